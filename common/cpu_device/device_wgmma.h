// The products of common/cuda/wgmma.h. Each call is a rendezvous of the 128 lanes of a warpgroup. A product is
// computed when it is issued; D is poison (all bits one) until a wait covers the product's group.
#pragma once

#include <type_traits>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

// Which axis the rows of a panel are, as in common/cuda/wgmma.h.
enum class Major { k, m };

// As on a GPU: address / 16, counted from the start of dynamic shared memory, and bytes between panels / 16.
struct SharedMatrix {
  uint32_t word;
};
inline SharedMatrix operator+(SharedMatrix matrix, int bytes) {
  return {matrix.word + bytes / 16};
}

namespace cpu_device {

struct WgmmaCall {
  float* d;
  int num_columns;
  bool adds;
  const uint32_t* registers;  // A, or null: in shared memory
  SharedMatrix a, b;
  bool rows_of_a_are_k, rows_of_b_are_k;  // m-major
};

SharedMatrix shared_matrix(const void* first, int panel_bytes, Site site);
template <typename T>
void wgmma(const WgmmaCall& call, Site site);
extern template void wgmma<__half>(const WgmmaCall& call, Site site);
extern template void wgmma<__nv_bfloat16>(const WgmmaCall& call, Site site);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(int num_pending, Site site);
void fence_async_proxy();

// Forgets the products of the block that the OS thread has run.
void forget_products();

}  // namespace cpu_device

__device__ __forceinline__ SharedMatrix shared_matrix(const void* first, int panel_bytes,
                                                      CPU_DEVICE_SITE) {
  return cpu_device::shared_matrix(first, panel_bytes, {file, line});
}

template <typename T, Major kMajorA, Major kMajorB, int kRegisters>
__device__ __forceinline__ void wgmma(float (&d)[kRegisters], SharedMatrix a, int offset_a,
                                      SharedMatrix b, int offset_b, bool adds, CPU_DEVICE_SITE) {
  static_assert(kRegisters == 32 || kRegisters == 64, "N is 64 or 128");
  cpu_device::wgmma<T>({d, 2 * kRegisters, adds, nullptr, a + offset_a, b + offset_b,
                        kMajorA == Major::m, kMajorB == Major::m},
                       {file, line});
}
template <typename T, Major kMajorB, int kRegisters>
__device__ __forceinline__ void wgmma(float (&d)[kRegisters], const uint32_t (&a)[4],
                                      SharedMatrix b, int offset_b, CPU_DEVICE_SITE) {
  static_assert(kRegisters == 32 || kRegisters == 64, "N is 64 or 128");
  cpu_device::wgmma<T>({d, 2 * kRegisters, true, a, {}, b + offset_b, false, kMajorB == Major::m},
                       {file, line});
}

// With any arrays. A pack of them would leave no room for the default arguments that tell the line.
#define CPU_DEVICE_WGMMA(types, parameters)                                 \
  template <types>                                                          \
  __device__ __forceinline__ void wgmma_fence(parameters CPU_DEVICE_SITE) { \
    cpu_device::wgmma_fence({file, line});                                  \
  }                                                                         \
  template <int kPending, types>                                            \
  __device__ __forceinline__ void wgmma_wait(parameters CPU_DEVICE_SITE) {  \
    static_assert(kPending >= 0, "a number of groups");                     \
    cpu_device::wgmma_wait(kPending, {file, line});                         \
  }
#define CPU_DEVICE_LIST(...) __VA_ARGS__
CPU_DEVICE_WGMMA(typename A, CPU_DEVICE_LIST(A&, ))
CPU_DEVICE_WGMMA(CPU_DEVICE_LIST(typename A, typename B), CPU_DEVICE_LIST(A&, B&, ))
CPU_DEVICE_WGMMA(CPU_DEVICE_LIST(typename A, typename B, typename C), CPU_DEVICE_LIST(A&, B&, C&, ))
CPU_DEVICE_WGMMA(CPU_DEVICE_LIST(typename A, typename B, typename C, typename D),
                 CPU_DEVICE_LIST(A&, B&, C&, D&, ))
#undef CPU_DEVICE_WGMMA
#undef CPU_DEVICE_LIST
__device__ __forceinline__ void wgmma_fence(CPU_DEVICE_SITE) {
  cpu_device::wgmma_fence({file, line});
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait(CPU_DEVICE_SITE) {
  cpu_device::wgmma_wait(kPending, {file, line});
}
__device__ __forceinline__ void wgmma_commit(CPU_DEVICE_SITE) {
  cpu_device::wgmma_commit({file, line});
}

__device__ __forceinline__ void fence_async_proxy() {
  cpu_device::fence_async_proxy();
}
template <int kRegisters>
__device__ __forceinline__ void give_up_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "registers");
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "registers");
}
