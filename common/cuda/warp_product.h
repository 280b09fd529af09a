// Products of one warp, of swizzled tiles in shared memory and of fragments in registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cuda/element.h"
#include "common/cuda/swizzle.h"
#include "common/cuda/tensor_core.h"

// acc [16 kRowTiles, 8 kColTiles] += A Bᵀ, A and B the first rows of two tiles.
template <int kRowTiles, int kColTiles, int kCols>
__device__ void add_product_bt(float (&acc)[kRowTiles][kColTiles][4], const Element (*a)[kCols],
                               const Element (*b)[kCols], LaneOffset<kCols> lane) {
#pragma unroll
  for (int k = 0; k < kCols; k += 16) {
    uint32_t fragment_a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) ldmatrix(fragment_a[i], at(a, 16 * i, k, lane.first));
#pragma unroll
    for (int j = 0; j < kColTiles; j += 2) {
      uint32_t fragment_b[4];
      ldmatrix(fragment_b, at(b, 8 * j, k, lane.second));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma<Element>(acc[i][j], fragment_a[i], fragment_b[0], fragment_b[1]);
        mma<Element>(acc[i][j + 1], fragment_a[i], fragment_b[2], fragment_b[3]);
      }
    }
  }
}

// acc [16 kRowTiles, kCols] += A B, A in registers, 16 kInnerTiles rows of B in a tile. between(step) is called
// before each of the kInnerTiles * kCols / 16 steps.
template <int kRowTiles, int kInnerTiles, int kCols, typename Between>
__device__ void add_product_ra(float (&acc)[kRowTiles][kCols / 8][4],
                               const uint32_t (&a)[kInnerTiles][kRowTiles][4],
                               const Element (*b)[kCols], LaneOffset<kCols> lane, Between between) {
#pragma unroll
  for (int k = 0; k < kInnerTiles; ++k) {
#pragma unroll
    for (int j = 0; j < kCols / 8; j += 2) {
      uint32_t fragment_b[4];
      ldmatrix_trans(fragment_b, at(b, 16 * k, 8 * j, lane.first));
      between(k * (kCols / 16) + j / 2);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma<Element>(acc[i][j], a[k][i], fragment_b[0], fragment_b[1]);
        mma<Element>(acc[i][j + 1], a[k][i], fragment_b[2], fragment_b[3]);
      }
    }
  }
}

// acc [16 kRowTiles, 8 kColTiles] += Aᵀ B: kInner rows of a tile, the columns from col_a on, and of B what
// load_b(fragment, row, col) loads: a fragment of 16 rows and 16 columns.
template <int kInner, int kRowTiles, int kColTiles, int kColsA, typename LoadB>
__device__ void add_product_at(float (&acc)[kRowTiles][kColTiles][4], const Element (*a)[kColsA],
                               int col_a, LaneOffset<kColsA> lane_a, LoadB load_b) {
#pragma unroll
  for (int k = 0; k < kInner; k += 16) {
    uint32_t fragment_a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      ldmatrix_trans(fragment_a[i], at(a, k, col_a + 16 * i, lane_a.second));
    }
#pragma unroll
    for (int j = 0; j < kColTiles; j += 2) {
      uint32_t fragment_b[4];
      load_b(fragment_b, k, 8 * j);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma<Element>(acc[i][j], fragment_a[i], fragment_b[0], fragment_b[1]);
        mma<Element>(acc[i][j + 1], fragment_a[i], fragment_b[2], fragment_b[3]);
      }
    }
  }
}

// Writes scale · acc [16 kRowTiles, kCols] to a dense matrix of num_rows rows, from row_start on: through
// `tile`, where no other warp touches these rows any more, for rows of memory are longer than those of fragments.
template <int kRowTiles, int kCols>
__device__ void store_rows(Element* matrix, const float (&acc)[kRowTiles][kCols / 8][4],
                           float scale, int row_start, int num_rows, Element (*tile)[kCols],
                           LaneOffset<kCols> lane_offset) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kCols / 8; j += 2) {
      uint32_t fragment[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* x = &acc[i][j + n / 2][n % 2 * 2];
        fragment[n] = pack<Element>(scale * x[0], scale * x[1]);
      }
      stmatrix(at(tile, 16 * i, 8 * j, lane_offset.first), fragment);
    }
  }
  __syncwarp();  // the rows are complete
#pragma unroll
  for (int n = threadIdx.x % 32; n < 16 * kRowTiles * (kCols / 8); n += 32) {
    const int row = n / (kCols / 8), col = n % (kCols / 8) * 8;
    if (row_start + row >= num_rows || col >= kHeadDim) continue;
    *reinterpret_cast<uint4*>(matrix + int64_t(row_start + row) * kHeadDim + col) =
        *reinterpret_cast<const uint4*>(&tile[row][swizzle<kCols>(row, col)]);
  }
}
