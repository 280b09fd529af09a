// Tensor cores: a warp multiplies small matrices of 16-bit numbers into fp32. Needs compute capability 8.0.
//
// All 32 lanes of a warp call these functions together. A lane holds a part of each matrix, its fragment, in
// 32-bit registers of two 16-bit numbers each, the one with the lower column (of B: row) in the lower half.
// With g = lane / 4 and t = lane % 4:
//
//   8x8 matrix of ldmatrix, stmatrix     register: (g, 2t) (g, 2t+1)
//
//          columns 0 1   2 3   4 5   6 7
//     row 0      lane 0  1     2     3
//     row 1      lane 4  5     6     7
//     ...
//     row 7      lane 28 29    30    31
//
//   A, 16x16, row-major                  a[0]: (g, 2t) (g, 2t+1)        a[2]: (g, 2t+8) (g, 2t+9)
//                                        a[1]: (g+8, 2t) (g+8, 2t+1)    a[3]: (g+8, 2t+8) (g+8, 2t+9)
//   B, 16x8, rows k                      b0: (2t, g) (2t+1, g)          b1: (2t+8, g) (2t+9, g)
//   C, 16x8, fp32                        c[0]: (g, 2t)    c[1]: (g, 2t+1)
//                                        c[2]: (g+8, 2t)  c[3]: (g+8, 2t+1)
//
// So A is four 8x8 matrices (upper left, lower left, upper right, lower right), B is two whose columns lie in
// memory as rows, and C, rounded to 16 bits in pairs, is half of an A: two C side by side make an A without a
// single exchange between lanes.
//
// PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#ifndef __CUDACC__
#include "device_tensor_core.h"
#else

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads kCount = 1, 2 or 4 matrices of 8x8 from shared memory. Lane 8i + r gives the address of row r of
// matrix i: 16 bytes, aligned to 16. Lanes 8 kCount and up give any valid address of shared memory.
template <int kCount>
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[kCount], const void* row) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "1, 2 or 4 matrices");
  const uint32_t address = shared_address(row);
  if constexpr (kCount == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}

// The same, and each matrix transposed: lane l receives (2t, g) and (2t+1, g) of the matrix in memory.
template <int kCount>
__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[kCount], const void* row) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "1, 2 or 4 matrices");
  const uint32_t address = shared_address(row);
  if constexpr (kCount == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}

// Stores kCount matrices of 8x8 to shared memory, addressed as by ldmatrix. An instruction from compute
// capability 9.0 on; before, each lane stores its own 4 bytes of each matrix.
template <int kCount>
__device__ __forceinline__ void stmatrix(void* row, const uint32_t (&r)[kCount]) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "1, 2 or 4 matrices");
  const uint32_t address = shared_address(row);
#if __CUDA_ARCH__ >= 900
  if constexpr (kCount == 1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(address), "r"(r[0])
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address),
                 "r"(r[0]), "r"(r[1])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  }
#else
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t target = __shfl_sync(0xffffffff, address, 8 * i + lane / 4) + 4 * (lane % 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(target), "r"(r[i]) : "memory");
  }
#endif
}

// C += A B on m16n8k16. T is __half or __nv_bfloat16.
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>, "16-bit types");
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Two fp32 numbers rounded to nearest even, as one register: x in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float x, float y) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(y), "f"(x));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(y), "f"(x));
  }
  return bits;
}

// The two numbers of a register.
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(reinterpret_cast<const __half2&>(bits));
  } else {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  }
}

// 2^x, with an error of 2 units in the last place; results below 2^-126 become zero.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif
