// Moving tiles of rows between global and shared memory.
#pragma once

#include <cstdint>

#include "common/cuda/element.h"

// One row of a tile in shared memory, as fp32. The odd length spreads the rows over the banks: 32 threads
// that read the same column of 32 rows meet no bank conflict.
using TileRow = float[kHeadDim + 1];

// Loads rows [row_start, row_start + kRows) of a matrix with num_rows rows. Rows past the end become
// zeros, so that they add nothing to any product.
template <int kRows, int kNumThreads>
__device__ void load_tile(TileRow* tile, const Element* matrix, int64_t row_stride, int row_start,
                          int num_rows) {
  for (int i = threadIdx.x; i < kRows * kHeadDim; i += kNumThreads) {
    const int row = i / kHeadDim, col = i % kHeadDim;
    const bool inside = row_start + row < num_rows;
    tile[row][col] = inside ? to_float(matrix[(row_start + row) * row_stride + col]) : 0.0f;
  }
}

// Writes scale * acc as rows [row_start, row_start + kRows) of a dense matrix with num_rows rows. Rows past
// the end are dropped. acc holds the elements of the [kRows, kHeadDim] tile that this thread owns: thread t
// owns elements t, t + kNumThreads, t + 2 kNumThreads ... in row-major order.
template <int kRows, int kNumThreads>
__device__ void store_tile(Element* matrix, const float* acc, float scale, int row_start,
                           int num_rows) {
  static_assert(kRows * kHeadDim % kNumThreads == 0, "every thread owns as many elements");
#pragma unroll
  for (int j = 0; j < kRows * kHeadDim / kNumThreads; ++j) {
    const int i = threadIdx.x + j * kNumThreads;
    const int row = row_start + i / kHeadDim, col = i % kHeadDim;
    if (row < num_rows) matrix[int64_t(row) * kHeadDim + col] = from_float<Element>(scale * acc[j]);
  }
}
