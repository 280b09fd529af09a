// Named barriers: 16 barriers of a block, each for some of its warps. Barrier 0 is the one of __syncthreads().
//
// num_threads, a multiple of 32, counts the threads that arrive, those that wait included; all callers of one
// phase pass the same number. A barrier that is complete can be used again at once.
//
// PTX ISA, "barrier, bar".
#pragma once

#include <cuda_runtime.h>

#ifndef __CUDACC__
#include "device_barrier.h"
#else

// Arrives and waits until num_threads threads have arrived. What they wrote before is visible after.
__device__ __forceinline__ void barrier_sync(int id, int num_threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Arrives and goes on. It must not run a phase ahead of those that wait.
__device__ __forceinline__ void barrier_arrive(int id, int num_threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

#endif
