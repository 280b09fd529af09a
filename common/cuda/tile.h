// Moving tiles of rows between global and shared memory.
#pragma once

#include <cstdint>

#include "common/cuda/element.h"

// One row of a tile in shared memory, as fp32. The odd length spreads the rows over the banks: 32 threads
// that read the same column of 32 rows meet no bank conflict.
using TileRow = float[kHeadDim + 1];

// Loads rows [row_start, row_start + kRows) of a matrix with num_rows rows. The tile has kPitch - 1 columns.
// Rows and columns past the matrix' end become zeros, so that they add nothing to any product.
template <int kRows, int kNumThreads, int kPitch>
__device__ void load_tile(float (*tile)[kPitch], const Element* matrix, int64_t row_stride,
                          int row_start, int num_rows, int num_cols = kPitch - 1) {
  constexpr int kCols = kPitch - 1;
  for (int i = threadIdx.x; i < kRows * kCols; i += kNumThreads) {
    const int row = i / kCols, col = i % kCols;
    const bool inside = row_start + row < num_rows && col < num_cols;
    tile[row][col] = inside ? to_float(matrix[(row_start + row) * row_stride + col]) : 0.0f;
  }
}

// A [kRows, kHeadDim] tile that a block computes is dealt out to its threads: thread t owns elements
// t, t + kNumThreads, t + 2 kNumThreads ... in row-major order, in registers.

// acc += A B, with A [kRows, kInner] and B [kInner, kHeadDim] in shared memory.
template <int kNumThreads, int kElements, int kRows, int kInner, int kPitch>
__device__ void add_product(float (&acc)[kElements], const float (&a)[kRows][kPitch],
                            const TileRow (&b)[kInner]) {
  static_assert(kElements * kNumThreads == kRows * kHeadDim, "acc is a [kRows, kHeadDim] tile");
#pragma unroll
  for (int j = 0; j < kElements; ++j) {
    const int i = threadIdx.x + j * kNumThreads;
    const int row = i / kHeadDim, col = i % kHeadDim;
#pragma unroll 8  // unrolling in full takes nvcc three times as long
    for (int n = 0; n < kInner; ++n) acc[j] += a[row][n] * b[n][col];
  }
}

// acc += Aᵀ B, with A [kInner, kRows] and B [kInner, kHeadDim] in shared memory. A's rows are longer than
// kRows by the padding that keeps banks apart.
template <int kNumThreads, int kElements, int kInner, int kPitch>
__device__ void add_transposed_product(float (&acc)[kElements], const float (&a)[kInner][kPitch],
                                       const TileRow (&b)[kInner]) {
  static_assert(kElements * kNumThreads == (kPitch - 1) * kHeadDim,
                "acc is a [kRows, kHeadDim] tile");
#pragma unroll
  for (int j = 0; j < kElements; ++j) {
    const int i = threadIdx.x + j * kNumThreads;
    const int row = i / kHeadDim, col = i % kHeadDim;
#pragma unroll 8
    for (int m = 0; m < kInner; ++m) acc[j] += a[m][row] * b[m][col];
  }
}

// Writes scale * acc as rows [row_start, row_start + kRows) of a dense matrix with num_rows rows. Rows past
// the end are dropped.
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
