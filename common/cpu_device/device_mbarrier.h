// The barriers of common/cuda/mbarrier.h, and the copies of common/cuda/tensor_map.h that report to them. A copy
// reads its source when it is issued; its destination is poison (all bits one) until a thread waits for the phase
// that the copy belongs to, and everything else that the phase needs is there.
#pragma once

#include "cuda.h"
#include "cuda_runtime.h"

struct MBarrier;

namespace cpu_device {

void mbarrier_init(MBarrier* barrier, int num_arrivals, Site site);
void mbarrier_arrive(MBarrier* barrier, Site site);
void mbarrier_expect(MBarrier* barrier, int bytes, Site site);
void mbarrier_wait(MBarrier* barrier, int parity, Site site);
void tma_load(void* panel, const CUtensorMap& map, MBarrier* barrier, int column, int row, int head,
              int batch, Site site);
void bulk_load(void* shared, const void* global, int bytes, MBarrier* barrier, Site site);

// Forgets the barriers of the block that the OS thread has run.
void forget_mbarriers();

}  // namespace cpu_device

__device__ __forceinline__ void mbarrier_init(MBarrier* barrier, int num_arrivals,
                                              CPU_DEVICE_SITE) {
  cpu_device::mbarrier_init(barrier, num_arrivals, {file, line});
}
__device__ __forceinline__ void mbarrier_init_fence() {}
__device__ __forceinline__ void mbarrier_arrive(MBarrier* barrier, CPU_DEVICE_SITE) {
  cpu_device::mbarrier_arrive(barrier, {file, line});
}
__device__ __forceinline__ void mbarrier_expect(MBarrier* barrier, int bytes, CPU_DEVICE_SITE) {
  cpu_device::mbarrier_expect(barrier, bytes, {file, line});
}
__device__ __forceinline__ void mbarrier_wait(MBarrier* barrier, int parity, CPU_DEVICE_SITE) {
  cpu_device::mbarrier_wait(barrier, parity, {file, line});
}

__device__ __forceinline__ void tma_load(void* panel, const CUtensorMap& map, MBarrier* barrier,
                                         int column, int row, int head, int batch,
                                         CPU_DEVICE_SITE) {
  cpu_device::tma_load(panel, map, barrier, column, row, head, batch, {file, line});
}
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes,
                                          MBarrier* barrier, CPU_DEVICE_SITE) {
  cpu_device::bulk_load(shared, global, bytes, barrier, {file, line});
}
