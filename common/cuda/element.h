// The element type and the head dimension. A build is specialised for one of each, so a kernel reads
// `Element` and `kHeadDim` like constants.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#if !defined(FA2_ELEMENT) || !defined(FA2_HEAD_DIM)
#error "build with -DFA2_ELEMENT=float|__half|__nv_bfloat16 and -DFA2_HEAD_DIM=16...128"
#endif

using Element = FA2_ELEMENT;
constexpr int kHeadDim = FA2_HEAD_DIM;

static_assert(kHeadDim % 8 == 0 && kHeadDim >= 16 && kHeadDim <= 128, "head_dim is 16, 24 ... 128");

__host__ __device__ __forceinline__ float to_float(float x) {
  return x;
}
__host__ __device__ __forceinline__ float to_float(__half x) {
  return __half2float(x);
}
__host__ __device__ __forceinline__ float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

// Rounds to nearest even.
template <typename T>
__host__ __device__ __forceinline__ T from_float(float x);
template <>
__host__ __device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__host__ __device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__host__ __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
