// Tiles of 16-bit numbers whose rows are not padded but permuted, so that ldmatrix meets no bank conflict.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda/element.h"

// ldmatrix reads the same 16-byte chunk of 8 rows, and would find them in the same banks. So chunk c of row r
// lies at chunk c ^ (r % 8); rows of 64 bytes, of which two share the 32 banks, at c ^ (r / 2 % 4).
template <int kCols>
__device__ int swizzle(int row, int col) {
  static_assert(kCols == 32 || kCols == 64 || kCols == 128, "64, 128 or 256 bytes");
  return kCols == 32 ? col ^ row / 2 % 4 * 8 : col ^ row % 8 * 8;
}

// Where a lane points ldmatrix within 16 rows and columns of a tile, as an offset in bytes. Four 8x8
// matrices: in `first`, down, then right; in `second`, right, then down.
template <int kCols>
struct LaneOffset {
  int first, second;

  __device__ LaneOffset() {
    const int lane = threadIdx.x % 32;
    first = 2 * (lane % 16 * kCols + swizzle<kCols>(lane % 16, lane / 16 * 8));
    second = 2 * ((lane % 8 + lane / 16 * 8) * kCols + swizzle<kCols>(lane % 8, lane / 8 % 2 * 8));
  }
};

// The address of a lane's row for the 16x16 elements at (row, col), both multiples of 16.
template <int kCols>
__device__ const void* at(const Element (*tile)[kCols], int row, int col, int lane_offset) {
  return reinterpret_cast<const char*>(tile[row]) + (lane_offset ^ 2 * col);
}
template <int kCols>
__device__ void* at(Element (*tile)[kCols], int row, int col, int lane_offset) {
  return reinterpret_cast<char*>(tile[row]) + (lane_offset ^ 2 * col);
}
