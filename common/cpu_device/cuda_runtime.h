// The CUDA runtime as the CPU device implements it. Found through the include path instead of the
// toolkit's header of the same name, so that a .cu file compiles unchanged with a host compiler.
//
// What is here is what the repository's kernels use. Names, argument orders and error codes are CUDA's.
#pragma once

#include <assert.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include "device_atomics.h"
#include "device_math.h"
#include "device_sync.h"
#include "device_types.h"

#ifdef CPU_DEVICE_CHECKED
// Calls are inlined as far as they go, so that an access knows its line in the kernel and in each helper.
#define __global__ __attribute__((flatten))
#else
#define __global__
#endif
#if defined(CPU_DEVICE_CHECKED) && defined(__clang__)
#define __device__ __attribute__((always_inline))  // its flatten goes one level deep
#else
#define __device__
#endif
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// A block runs on one OS thread, so a thread-local array is shared by exactly the threads of a block. The
// section tells it from other thread-local variables; each has its own, as GCC lets arrays of templates and
// of other functions not share one.
#define CPU_DEVICE_STRING(x) CPU_DEVICE_STRING_OF(x)
#define CPU_DEVICE_STRING_OF(x) #x
#define CPU_DEVICE_SHARED \
  thread_local __attribute__((section("fa2_shared." CPU_DEVICE_STRING(__COUNTER__))))
#ifdef CPU_DEVICE_CHECKED
// Apart, so that what runs past the end of an array does not land in the next, unless it fills its space.
#define __shared__ CPU_DEVICE_SHARED __attribute__((aligned(256)))
#else
#define __shared__ CPU_DEVICE_SHARED
#endif

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchTimeout = 702,
  cudaErrorAssert = 710,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
};

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};

enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

using cudaStream_t = struct CUstream_st*;

struct cudaLaunchAttribute;  // The CPU device accepts none.

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned int numAttrs = 0;
};

// The text of the last failed call of this OS thread for the code it returned; CUDA's own names otherwise.
const char* cudaGetErrorString(cudaError_t error);
const char* cudaGetErrorName(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

// Work runs to completion inside the launch, so every stream is always idle.
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaStreamSynchronize(cudaStream_t stream);

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);

cudaError_t cudaMalloc(void** pointer, size_t bytes);
template <typename T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(pointer), bytes);
}
cudaError_t cudaFree(void* pointer);
cudaError_t cudaMemset(void* pointer, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);

enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
};
inline constexpr unsigned long long cudaEnableDefault = 0;
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                             unsigned int version, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result);

namespace cpu_device {

cudaError_t set_function_attribute(const void* kernel, cudaFuncAttribute attribute, int value);

// Runs `invoke(closure)` once per CUDA thread of the grid; the first error found ends the launch.
cudaError_t launch_grid(const void* kernel, const cudaLaunchConfig_t& config,
                        void (*invoke)(const void* closure), const void* closure,
                        size_t closure_bytes);

// A kernel and its arguments. The checker's hooks are kept out of the call: they would leave their traces on the
// stack, where the kernel's locals will be.
template <typename... Parameters>
struct Closure {
  void (*kernel)(Parameters...);
  std::tuple<Parameters...> arguments;

  template <size_t... kIndices>
  __attribute__((no_sanitize("thread"))) void call(std::index_sequence<kIndices...>) const {
    kernel(std::get<kIndices>(arguments)...);
  }
  __attribute__((no_sanitize("thread"))) static void invoke(const void* closure) {
    static_cast<const Closure*>(closure)->call(std::index_sequence_for<Parameters...>{});
  }
};

}  // namespace cpu_device

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  return cpu_device::set_function_attribute(reinterpret_cast<const void*>(kernel), attribute,
                                            value);
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  using Closure = cpu_device::Closure<Parameters...>;
  const Closure closure{kernel, std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)};
  return cpu_device::launch_grid(reinterpret_cast<const void*>(kernel), *config, Closure::invoke,
                                 &closure, sizeof(closure));
}
