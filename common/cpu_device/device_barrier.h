// The named barriers of common/cuda/barrier.h. Different warps may call one from different lines, the lanes
// of a warp call it together.
#pragma once

#include "cuda_runtime.h"

namespace cpu_device {

void barrier_sync(int id, int num_threads, Site site);
void barrier_arrive(int id, int num_threads, Site site);

}  // namespace cpu_device

__device__ __forceinline__ void barrier_sync(int id, int num_threads, CPU_DEVICE_SITE) {
  cpu_device::barrier_sync(id, num_threads, {file, line});
}
__device__ __forceinline__ void barrier_arrive(int id, int num_threads, CPU_DEVICE_SITE) {
  cpu_device::barrier_arrive(id, num_threads, {file, line});
}
