// Launching a kernel, and its dynamic shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "common/cuda/launch_error.h"

extern __shared__ __align__(1024) unsigned char fa2_dynamic_smem[];

// The block's dynamic shared memory, 1024-byte aligned. One name for all kernels: two `extern __shared__`
// arrays of different types in one program clash.
template <typename T>
__device__ __forceinline__ T* dynamic_smem() {
  return reinterpret_cast<T*>(fa2_dynamic_smem);
}

// Starts `kernel` on `stream`, raising the kernel's dynamic shared-memory limit first where needed.
// Takes the place of <<<grid, block, smem_bytes, stream>>>, which a host compiler cannot parse.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t smem_bytes,
                   cudaStream_t stream, Arguments... arguments) {
  constexpr size_t kLimitWithoutAsking = 48 * 1024;
  launch_error.clear();
  cudaError_t error = cudaSuccess;
  if (smem_bytes > kLimitWithoutAsking) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(smem_bytes));
    if (error == cudaErrorInvalidValue) {
      int device = 0, limit = 0;
      cudaGetDevice(&device);
      cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
      launch_error = "a block needs " + std::to_string(smem_bytes) +
                     " bytes of shared memory, this device has " + std::to_string(limit);
    }
  }
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = smem_bytes;
    config.stream = stream;
    error = cudaLaunchKernelEx(&config, kernel, arguments...);
  }
  if (error != cudaSuccess && launch_error.empty()) {
    launch_error = std::string(cudaGetErrorString(error)) + " (grid " + std::to_string(grid.x) +
                   "x" + std::to_string(grid.y) + "x" + std::to_string(grid.z) + ", block " +
                   std::to_string(block.x) + "x" + std::to_string(block.y) + "x" +
                   std::to_string(block.z) + ", " + std::to_string(smem_bytes) +
                   " bytes of shared memory)";
  }
  if (error != cudaSuccess) cudaGetLastError();  // or the next, unrelated launch would report it
  return error;
}
