// Barriers in shared memory that count arrivals and bytes: how a copy by hardware tells that it is complete. Needs
// compute capability 9.0.
//
// A barrier is in phase 0, 1, 2 ... A phase is complete once as many threads have arrived as mbarrier_init() said
// and as many bytes have been copied as mbarrier_expect() announced in it; the next phase begins at once, with the
// same number of arrivals and no bytes. A thread waits for the parity of a phase:
//
//     phase        0         1         2            a wait for parity 0 returns in phase 1, one for parity 1 in
//     parity    |  0  |---|  1  |---|  0  |         phase 0 and in phase 2: it means "the phase before this one".
//
// So who fills a buffer for the first time may wait for parity 1 and does not wait at all. Nobody may be left
// behind by two phases. What a thread did before it arrived, and what the copies wrote, is visible after the wait.
//
// PTX ISA, "mbarrier".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cuda/tensor_core.h"

struct MBarrier {
  uint64_t state;
};

#ifndef __CUDACC__
#include "device_mbarrier.h"
#else

// By one thread. mbarrier_init_fence() and a block barrier follow before anybody uses it.
__device__ __forceinline__ void mbarrier_init(MBarrier* barrier, int num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(num_arrivals)
               : "memory");
}

// The barriers that this thread has initialised are there for the hardware that copies, too.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(MBarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives, and announces copies of so many bytes, which this thread starts next.
__device__ __forceinline__ void mbarrier_expect(MBarrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait(MBarrier* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred is_complete;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 is_complete, [%0], %1;\n"
      "@!is_complete bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

#endif
