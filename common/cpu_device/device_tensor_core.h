// The tensor core operations of common/cuda/tensor_core.h. Each is a rendezvous of a warp's 32 lanes, which
// orders no memory: a lane reads its row when it arrives, and writes it when it goes on.
#pragma once

#include <type_traits>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

namespace cpu_device {

void ldmatrix(uint32_t* r, int count, bool transposed, const void* row, Site site);
void stmatrix(void* row, const uint32_t* r, int count, Site site);
void mma_half(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, Site site);
void mma_bfloat16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, Site site);

}  // namespace cpu_device

template <int kCount>
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[kCount], const void* row, CPU_DEVICE_SITE) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "1, 2 or 4 matrices");
  cpu_device::ldmatrix(r, kCount, false, row, {file, line});
}
template <int kCount>
__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[kCount], const void* row,
                                               CPU_DEVICE_SITE) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "1, 2 or 4 matrices");
  cpu_device::ldmatrix(r, kCount, true, row, {file, line});
}
template <int kCount>
__device__ __forceinline__ void stmatrix(void* row, const uint32_t (&r)[kCount], CPU_DEVICE_SITE) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "1, 2 or 4 matrices");
  cpu_device::stmatrix(row, r, kCount, {file, line});
}

template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    CPU_DEVICE_SITE) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>, "16-bit types");
  if constexpr (std::is_same_v<T, __half>) {
    cpu_device::mma_half(c, a, b0, b1, {file, line});
  } else {
    cpu_device::mma_bfloat16(c, a, b0, b1, {file, line});
  }
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float x, float y) {
  return uint32_t(T(x).__x) | uint32_t(T(y).__x) << 16;
}
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t bits) {
  return {float(T::from_bits(uint16_t(bits))), float(T::from_bits(uint16_t(bits >> 16)))};
}

__device__ __forceinline__ float fast_exp2(float x) {
  return x < -126.0f ? 0.0f : ::exp2f(x);
}
