// Copies by the tensor memory accelerator (TMA): one thread names a tile of a tensor, hardware computes the
// addresses and copies it into shared memory. Needs compute capability 9.0.
//
// A tensor map describes a tensor [batch, head, row, column] of 16-bit numbers and a tile of it: 64 columns of some
// rows of one head. What lies past the last row or column arrives as zeros. A tile is a panel in shared memory:
// its rows are 128 bytes long and follow each other, and the 16-byte chunk c of row r lies at chunk c ^ (r % 8):
//
//             chunk 0   1   2   3   4   5   6   7        so that what stands in one column, read by the tensor
//     row 0       0   1   2   3   4   5   6   7          cores or by ldmatrix, lies in different banks. The swizzle
//     row 1       1   0   3   2   5   4   7   6          is one of addresses, so a panel starts at a multiple of
//     row 2       2   3   0   1   6   7   4   5          1024 bytes.
//     ...
//     row 7       7   6   5   4   3   2   1   0
//
// Copies report their bytes to an mbarrier, zeros included. Until a wait for it, the destination may be neither
// read nor written; what was read there before must be ordered before the copy.
//
// CUDA Driver API, "Tensor Map Object Management"; PTX ISA, "cp.async.bulk.tensor".
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "common/cuda/launch_error.h"
#include "common/cuda/mbarrier.h"

constexpr int kPanelColumns = 64;

// Passed to a kernel as `const __grid_constant__ TensorMap`.
using TensorMap = CUtensorMap;

// What is to be mapped: the sizes of its four axes, the last one first, and the distances along all but that one, in
// elements. Along an axis of size 1 the distance may be any.
struct MappedTensor {
  const void* data;
  int64_t columns, rows, heads, batch;
  int64_t row_stride, head_stride, batch_stride;
};

// The map of a tensor whose tiles have `tile_rows` rows, at most 256. If the tensor is not one that can be mapped,
// launch_error says why: `name` starts, or has strides, at no multiple of 16 bytes.
template <typename T>
cudaError_t make_tensor_map(TensorMap* map, const char* name, const MappedTensor& tensor,
                            int tile_rows) {
  static_assert(sizeof(T) == 2, "16-bit types");
  const auto bytes = [](int64_t size, int64_t stride) {
    return static_cast<cuuint64_t>(size == 1 ? 16 : stride * int64_t(sizeof(T)));
  };
  const cuuint64_t sizes[] = {
      static_cast<cuuint64_t>(tensor.columns), static_cast<cuuint64_t>(tensor.rows),
      static_cast<cuuint64_t>(tensor.heads), static_cast<cuuint64_t>(tensor.batch)};
  const cuuint64_t strides[] = {bytes(tensor.rows, tensor.row_stride),
                                bytes(tensor.heads, tensor.head_stride),
                                bytes(tensor.batch, tensor.batch_stride)};
  const cuuint32_t tile[] = {kPanelColumns, static_cast<cuuint32_t>(tile_rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  // Through the runtime, so that nothing has to be linked with the driver's library.
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) {
    launch_error = "the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12";
    return cudaErrorNotSupported;
  }
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      map,
      std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      4, const_cast<void*>(tensor.data), sizes, strides, tile, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return cudaSuccess;
  launch_error = std::string(name) + " cannot be copied by the tensor memory accelerator: its" +
                 " address and strides have to be multiples of 16 bytes";
  return cudaErrorInvalidValue;
}

#ifdef __CUDACC__

// Starts a copy of the tile that begins at (row, column) of one head; its bytes are those of a whole tile.
__device__ __forceinline__ void tma_load(void* panel, const TensorMap& map, MBarrier* barrier,
                                         int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(panel)),
      "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Starts a copy of `bytes` bytes as they lie; both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes,
                                          MBarrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

#endif
