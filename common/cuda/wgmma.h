// Products of a warpgroup: four warps, 128 threads, multiply matrices of 16-bit numbers into fp32 while the threads
// go on. Needs compute capability 9.0, and code for it alone (sm_90a).
//
// All threads of a warpgroup (threads 128 w to 128 w + 127 of the block) call these functions together. One wgmma
// computes D [64, N] += A [64, 16] B [16, N], N = 64 or 128:
//
//   D, fp32. Warp w of the warpgroup has rows 16 w to 16 w + 15; every 8 columns of them are a C of mma.m16n8k16
//   (tensor_core.h), so with g = lane / 4, t = lane % 4:
//
//       d[4 j]: (16 w + g, 8 j + 2 t)          d[4 j + 1]: (16 w + g, 8 j + 2 t + 1)
//       d[4 j + 2]: (16 w + g + 8, 8 j + 2 t)  d[4 j + 3]: (16 w + g + 8, 8 j + 2 t + 1)
//
//   A, in registers: the A of mma.m16n8k16, of the same rows. Or in shared memory, as B always is: in panels of 64
//   numbers a row, swizzled like those of tensor_map.h. A panel's rows may be either axis of the matrix:
//
//       k-major: a row is one row of A (column of B), and holds 64 of what the product sums over
//       m-major: a row is one of the 16 that the product sums over, and holds 64 rows of A (columns of B)
//
//           k-major A [64, 16]                     m-major B [16, 128], two panels
//
//           row 0   | k 0 ... 15 | next 16 |       k 0     | columns 0 ... 63 |   | columns 64 ... 127 |
//           row 1   | k 0 ... 15 |                 k 1     |                  |   |                    |
//             ...                                    ...
//           row 63  | k 0 ... 15 |                 k 15    |                  |   |                    |
//                                                  next 16 |                  |   |                    |
//
//   So the next 16 of the sum are 32 bytes on in the first case, and 16 rows, 2048 bytes, in the second.
//
// A product is under way until wgmma_wait() says otherwise. Until then its D may not be touched, save by further
// products of the same shape, which add to it in order; nor may its A in registers change, nor what it reads of
// shared memory. Products read shared memory as TMA does, not as a thread does: what threads stored there they
// must pass on with fence_async_proxy(), before the barrier that tells the others.
//
// PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate operations".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/cuda/tensor_core.h"

constexpr int kWarpgroupThreads = 128;

#ifndef __CUDACC__
#include "device_wgmma.h"
#else

// Which axis the rows of a panel are.
enum class Major { k, m };

// A matrix in shared memory. The hardware is told of it by 64 bits, of which only the lower half differs from one
// matrix to another here; so a thread keeps 32 and the rest is added when a product is issued.
//
//     bits 0-13   address / 16                                  bits 32-45  1024 / 16: from 8 rows to the next 8
//     bits 16-29  bytes from one panel to the next / 16,        bits 62-63  1: swizzle of 128 bytes
//                 where a product reads several (m-major, N = 128)
struct SharedMatrix {
  uint32_t word;
};

__device__ __forceinline__ SharedMatrix shared_matrix(const void* first, int panel_bytes) {
  return {shared_address(first) / 16 | static_cast<uint32_t>(panel_bytes / 16) << 16};
}

// The same matrix, so many bytes on, a multiple of 16.
__device__ __forceinline__ SharedMatrix operator+(SharedMatrix matrix, int bytes) {
  return {matrix.word + bytes / 16};
}

// To the compiler these registers change here, so that it moves no access to them across.
__device__ __forceinline__ void pin(float& x) {
  asm volatile("" : "+f"(x)::"memory");
}
__device__ __forceinline__ void pin(uint32_t& x) {
  asm volatile("" : "+r"(x)::"memory");
}
template <typename T, int kCount>
__device__ __forceinline__ void pin(T (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) pin(registers[i]);
}

// Before the first product, and before one whose D or A the threads have touched since the last: `registers` are
// those arrays.
template <typename... Arrays>
__device__ __forceinline__ void wgmma_fence(Arrays&... registers) {
  (pin(registers), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Ends a group of products.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the kPending youngest groups are under way. `registers`: the D and A of those that are not.
template <int kPending, typename... Arrays>
__device__ __forceinline__ void wgmma_wait(Arrays&... registers) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (pin(registers), ...);
}

// What this thread has stored in shared memory can be read by wgmma, once a barrier has told of it.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A warpgroup changes the number of registers of its threads, a multiple of 8: what some give up, others can take.
template <int kRegisters>
__device__ __forceinline__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The instructions: 32 or 64 registers of D, and behind them the operands from number %A on. A matrix in shared
// memory is a word and an offset.
#define FA2_EIGHT(constraint, i)                                                      \
  constraint(d[i]), constraint(d[i + 1]), constraint(d[i + 2]), constraint(d[i + 3]), \
      constraint(d[i + 4]), constraint(d[i + 5]), constraint(d[i + 6]), constraint(d[i + 7])
#define FA2_32(constraint)                                                       \
  FA2_EIGHT(constraint, 0), FA2_EIGHT(constraint, 8), FA2_EIGHT(constraint, 16), \
      FA2_EIGHT(constraint, 24)
#define FA2_64(constraint)                                                  \
  FA2_32(constraint), FA2_EIGHT(constraint, 32), FA2_EIGHT(constraint, 40), \
      FA2_EIGHT(constraint, 48), FA2_EIGHT(constraint, 56)
#define FA2_NAMES_32                                                                   \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22," \
  "%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FA2_NAMES_64                                                                      \
  FA2_NAMES_32                                                                            \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52," \
  "%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define FA2_DESCRIPTOR(name, word, offset)                                                  \
  ".reg .b64 " name ";\n.reg .b32 " name "_low;\nadd.u32 " name "_low, %" word ", %" offset \
  ";\nmov.b64 " name ", {" name "_low, 0x40000040};\n"
#define FA2_SHARED(N, NAMES, TYPE, A, OFFSET_A, B, OFFSET_B, MAJOR_A, MAJOR_B, ADD)            \
  "{\n" FA2_DESCRIPTOR("a", A, OFFSET_A)                                                       \
      FA2_DESCRIPTOR("b", B, OFFSET_B) "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE   \
                                       "." TYPE " {" NAMES "}, a, b, " ADD ", 1, 1, %" MAJOR_A \
                                       ", %" MAJOR_B ";\n}"
#define FA2_REGISTERS(N, NAMES, TYPE, A0, A1, A2, A3, B, OFFSET_B, MAJOR_B, ADD)                   \
  "{\n" FA2_DESCRIPTOR("b", B, OFFSET_B) "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE     \
                                         "." TYPE " {" NAMES "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 \
                                         "}, b, " ADD ", 1, 1, %" MAJOR_B ";\n}"

#define FA2_ISSUE_SHARED(N, NAMES, D, CONSTRAINT, TYPE, ADD, A, OFFSET_A, B, OFFSET_B, MAJOR_A, \
                         MAJOR_B)                                                               \
  asm volatile(FA2_SHARED(N, NAMES, TYPE, A, OFFSET_A, B, OFFSET_B, MAJOR_A, MAJOR_B, ADD)      \
               : D(CONSTRAINT)                                                                  \
               : "r"(a.word), "r"(offset_a / 16), "r"(b.word), "r"(offset_b / 16),              \
                 "n"(kMajorA == Major::m), "n"(kMajorB == Major::m)                             \
               : "memory")
#define FA2_ISSUE_REGISTERS(N, NAMES, D, CONSTRAINT, TYPE, ADD, A0, A1, A2, A3, B, OFFSET_B,  \
                            MAJOR_B)                                                          \
  asm volatile(FA2_REGISTERS(N, NAMES, TYPE, A0, A1, A2, A3, B, OFFSET_B, MAJOR_B, ADD)       \
               : D(CONSTRAINT)                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.word), "r"(offset_b / 16), \
                 "n"(kMajorB == Major::m)                                                     \
               : "memory")
#define FA2_ANY_TYPE(ISSUE, N, NAMES, D, CONSTRAINT, ADD, ...) \
  if constexpr (std::is_same_v<T, __half>) {                   \
    ISSUE(N, NAMES, D, CONSTRAINT, "f16", ADD, __VA_ARGS__);   \
  } else {                                                     \
    ISSUE(N, NAMES, D, CONSTRAINT, "bf16", ADD, __VA_ARGS__);  \
  }

// D = A B, or D += A B with `adds`, a constant once inlined; likewise the offsets in bytes.
template <typename T, Major kMajorA, Major kMajorB, int kRegisters>
__device__ __forceinline__ void wgmma(float (&d)[kRegisters], SharedMatrix a, int offset_a,
                                      SharedMatrix b, int offset_b, bool adds) {
  static_assert(kRegisters == 32 || kRegisters == 64, "N is 64 or 128");
  if constexpr (kRegisters == 32) {
    if (adds) {
      FA2_ANY_TYPE(FA2_ISSUE_SHARED, "64", FA2_NAMES_32, FA2_32, "+f", "1", "32", "33", "34", "35",
                   "36", "37")
    } else {
      FA2_ANY_TYPE(FA2_ISSUE_SHARED, "64", FA2_NAMES_32, FA2_32, "=f", "0", "32", "33", "34", "35",
                   "36", "37")
    }
  } else {
    if (adds) {
      FA2_ANY_TYPE(FA2_ISSUE_SHARED, "128", FA2_NAMES_64, FA2_64, "+f", "1", "64", "65", "66", "67",
                   "68", "69")
    } else {
      FA2_ANY_TYPE(FA2_ISSUE_SHARED, "128", FA2_NAMES_64, FA2_64, "=f", "0", "64", "65", "66", "67",
                   "68", "69")
    }
  }
}

// D += A B with A in registers.
template <typename T, Major kMajorB, int kRegisters>
__device__ __forceinline__ void wgmma(float (&d)[kRegisters], const uint32_t (&a)[4],
                                      SharedMatrix b, int offset_b) {
  static_assert(kRegisters == 32 || kRegisters == 64, "N is 64 or 128");
  if constexpr (kRegisters == 32) {
    FA2_ANY_TYPE(FA2_ISSUE_REGISTERS, "64", FA2_NAMES_32, FA2_32, "+f", "1", "32", "33", "34", "35",
                 "36", "37", "38")
  } else {
    FA2_ANY_TYPE(FA2_ISSUE_REGISTERS, "128", FA2_NAMES_64, FA2_64, "+f", "1", "64", "65", "66",
                 "67", "68", "69", "70")
  }
}

#undef FA2_EIGHT
#undef FA2_32
#undef FA2_64
#undef FA2_NAMES_32
#undef FA2_NAMES_64
#undef FA2_DESCRIPTOR
#undef FA2_SHARED
#undef FA2_REGISTERS
#undef FA2_ISSUE_SHARED
#undef FA2_ISSUE_REGISTERS
#undef FA2_ANY_TYPE

#endif
