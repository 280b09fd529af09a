// Additions into global memory that return nothing, so that the L2 cache does them on its own.
#pragma once

#include <cuda_runtime.h>

#ifndef __CUDACC__
#include "device_reduce.h"
#else

// address[0..3] += x[0..3], each addition atomic; the address is a multiple of 16. One instruction from compute
// capability 9.0 on, four before.
__device__ __forceinline__ void reduce_add(float* address, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address + i), "f"(x[i])
                 : "memory");
  }
#endif
}

// The same if `adds`, without a branch: the compiler can put other instructions between several of them.
__device__ __forceinline__ void reduce_add_if(bool adds, float* address, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %5, 0;\n"
      "@adds red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(address),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(static_cast<int>(adds))
      : "memory");
#else
  if (adds) reduce_add(address, x);
#endif
}

#endif
