// The asynchronous copies of common/cuda/async_copy.h: the source is read when a copy is issued, and the
// destination is poison (all bits one) until the wait that covers it.
#pragma once

#include "cuda_runtime.h"

namespace cpu_device {

void cp_async_16(void* shared, const void* global, bool inside, Site site);
void cp_async_commit();
void cp_async_wait(int num_pending);

}  // namespace cpu_device

__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool inside = true,
                                            CPU_DEVICE_SITE) {
  cpu_device::cp_async_16(shared, global, inside, {file, line});
}
__device__ __forceinline__ void cp_async_commit() {
  cpu_device::cp_async_commit();
}
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  static_assert(kPending >= 0, "a number of groups");
  cpu_device::cp_async_wait(kPending);
}
