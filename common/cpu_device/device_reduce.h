// The additions of common/cuda/reduce.h.
#pragma once

#include "cuda_runtime.h"

namespace cpu_device {

void reduce_add(float* address, const float* x, Site site);

}  // namespace cpu_device

__device__ __forceinline__ void reduce_add(float* address, const float (&x)[4], CPU_DEVICE_SITE) {
  cpu_device::reduce_add(address, x, {file, line});
}
__device__ __forceinline__ void reduce_add_if(bool adds, float* address, const float (&x)[4],
                                              CPU_DEVICE_SITE) {
  if (adds) cpu_device::reduce_add(address, x, {file, line});
}
