// Atomic additions to global memory.
#pragma once

#include <type_traits>

#include "common/cuda/element.h"

// address[0] += x and address[1] += y. 16-bit types go as one atomicAdd for both, which rounds each sum
// to 16 bits (before sm_90 a loop in bf16); their address is a multiple of 4 bytes.
template <typename T>
__device__ void atomic_add_pair(T* address, float x, float y) {
  if constexpr (std::is_same_v<T, float>) {
    atomicAdd(address, x);
    atomicAdd(address + 1, y);
  } else if constexpr (std::is_same_v<T, __half>) {
    atomicAdd(reinterpret_cast<__half2*>(address), __floats2half2_rn(x, y));
  } else {
    atomicAdd(reinterpret_cast<__nv_bfloat162*>(address), __floats2bfloat162_rn(x, y));
  }
}
