// Copies from global to shared memory that run while the thread goes on. Needs compute capability 8.0.
//
// A thread's copies since its last cp_async_commit() form a group. Its groups arrive in order. Until a wait
// that covers it, the destination holds nothing that may be read, nor may it be written; and the wait is only
// about the thread's own copies: a barrier must follow before another thread reads them.
//
// PTX ISA, "cp.async".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#ifndef __CUDACC__
#include "device_async_copy.h"
#else

// Starts a copy of 16 bytes; both addresses are multiples of 16. If not `inside`, 16 zeros are written and
// `global` is not read.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool inside = true) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
               "r"(inside ? 16 : 0)
               : "memory");
}

// Ends the group.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the kPending youngest groups of this thread are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#endif
