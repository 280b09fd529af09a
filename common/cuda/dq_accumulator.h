// The fp32 sum of dQ in the order in which registers hold it, the kernels before and after the main one, and the
// launches of all three.
//
// dq_accum is [splits][heads][rows / 16][kCols / 8][lane][4]: 16x8 fragments of an mma's C, so that a warp adds
// 512 bytes in one piece. Rows are padded to whole tiles of queries.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cuda/attention.h"
#include "common/cuda/launch.h"
#include "common/cuda/reduce.h"
#include "common/cuda/schedule.h"
#include "common/cuda/tensor_core.h"
#include "common/cuda/workspace.h"

constexpr float kLog2e = 1.44269504f;

// Sizes of a backward launch whose blocks own kBlockN keys and walk over tiles of kBlockM queries.
template <int kBlockM, int kBlockN, int kPaddedDim>
struct BackwardSizes {
  static constexpr int kCols = kPaddedDim;
  static constexpr int kMaxSplits = 8;  // with deterministic

  int64_t heads;        // batch · num_heads
  int num_n_blocks;     // of a head
  int num_splits;       // dQ accumulators of a head
  int64_t padded_rows;  // of a head in the scratch arrays

  __host__ __device__ explicit BackwardSizes(const BackwardParams& params)
      : heads(int64_t(params.batch) * params.num_heads),
        num_n_blocks((params.seqlen_k + kBlockN - 1) / kBlockN),
        num_splits(params.deterministic ? min(num_n_blocks, kMaxSplits) : 1),
        padded_rows((int64_t(params.seqlen_q) + kBlockM - 1) / kBlockM * kBlockM) {}

  // Elements of dq_accum that belong to one split.
  __host__ __device__ int64_t split_elements() const { return heads * padded_rows * kCols; }
};

// dQ_accum += acc, at (row, col) of the rows of a head or of all heads; both multiples of a fragment's sides.
template <int kCols, int kRowTiles, int kColTiles>
__device__ void add_to_dq(float* accum, int64_t row, int col,
                          const float (&acc)[kRowTiles][kColTiles][4]) {
  float* target = accum + row * kCols + (col / 8 * 32 + threadIdx.x % 32) * 4;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColTiles; ++j) {
      reduce_add(target + (i * (kCols / 8) + j) * 128, acc[i][j]);
    }
  }
}

// The sum of the products of eight elements.
__device__ inline float dot(uint4 x, uint4 y) {
  const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 c = unpack<Element>(a[i]), d = unpack<Element>(b[i]);
    sum += c.x * d.x + c.y * d.y;
  }
  return sum;
}

constexpr int kRowsPerThread = 4;  // of the prepare kernel: many loads under way hide their latency

// neg_delta = -rowsum(O ∘ dO) and lse_log2 = -lse · log2 e, and zeros in dq_accum. A row that sees no key
// (lse = -inf) and a row past the last get lse_log2 = -inf, which makes their P zero.
template <typename Sizes>
__global__ void __launch_bounds__(256) prepare_kernel(const BackwardParams params, float* lse_log2,
                                                      float* neg_delta, float* dq_accum) {
  constexpr int kCols = Sizes::kCols;
  constexpr int kThreadsPerRow = kCols / 8;
  constexpr int kRowsAtOnce = 256 / kThreadsPerRow;
  const Sizes sizes(params);
  const int batch = blockIdx.x / params.num_heads, head = blockIdx.x % params.num_heads;
  const Element* out = params.out + params.out_strides.offset(batch, head);
  const Element* dout = params.dout + params.dout_strides.offset(batch, head);
  const float* lse = params.lse + int64_t(blockIdx.x) * params.seqlen_q;
  const int64_t head_row = blockIdx.x * sizes.padded_rows;
  const int col = threadIdx.x % kThreadsPerRow * 8;
  for (int64_t first_row =
           blockIdx.y * (kRowsPerThread * kRowsAtOnce) + threadIdx.x / kThreadsPerRow;
       first_row < sizes.padded_rows; first_row += gridDim.y * (kRowsPerThread * kRowsAtOnce)) {
    uint4 x[kRowsPerThread] = {}, y[kRowsPerThread] = {};
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int64_t row = first_row + i * kRowsAtOnce;
      if (row >= params.seqlen_q || col >= kHeadDim) continue;
      x[i] = *reinterpret_cast<const uint4*>(out + row * params.out_strides.row + col);
      y[i] = *reinterpret_cast<const uint4*>(dout + row * params.dout_strides.row + col);
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int64_t row = first_row + i * kRowsAtOnce;
      float sum = dot(x[i], y[i]);
#pragma unroll
      for (int offset = kThreadsPerRow / 2; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, offset);
      }
      if (row >= sizes.padded_rows) continue;
      if (col == 0) {
        const float row_lse = row < params.seqlen_q ? lse[row] : -INFINITY;
        lse_log2[head_row + row] = row_lse == -INFINITY ? -INFINITY : -row_lse * kLog2e;
        neg_delta[head_row + row] = -sum;
      }
      for (int split = 0; split < sizes.num_splits; ++split) {
        float* accum = dq_accum + split * sizes.split_elements() + (head_row + row) * kCols;
        // A thread's 16 bytes beside those of its neighbours.
        *reinterpret_cast<float4*>(accum + col / 2) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        *reinterpret_cast<float4*>(accum + kCols / 2 + col / 2) =
            make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
  }
}

template <typename Sizes>
cudaError_t launch_prepare(const BackwardParams& params, float* lse_log2, float* neg_delta,
                           float* dq_accum, cudaStream_t stream) {
  constexpr int kRows = kRowsPerThread * 256 / (Sizes::kCols / 8);  // of a block
  const int64_t blocks = (Sizes(params).padded_rows + kRows - 1) / kRows;
  return launch(prepare_kernel<Sizes>, head_grid(params, blocks), dim3(256), 0, stream, params,
                lse_log2, neg_delta, dq_accum);
}

// dQ = softmax_scale · Σ dQ_accum[split], in the order of the splits, rounded to the output's dtype. A thread
// takes what four lanes hold: 8 columns of two rows.
template <typename Sizes>
__global__ void __launch_bounds__(256)
    convert_kernel(const BackwardParams params, const float* dq_accum) {
  constexpr int kCols = Sizes::kCols;
  constexpr int kPieces = kHeadDim / 8;  // of a row
  const Sizes sizes(params);
  const int64_t num_pieces = sizes.padded_rows / 2 * kPieces;  // of one head
  const float* head_accum = dq_accum + blockIdx.x * sizes.padded_rows * kCols;
  Element* dq = params.dq + int64_t(blockIdx.x) * params.seqlen_q * kHeadDim;
  for (int64_t i = int64_t(blockIdx.y) * 256 + threadIdx.x; i < num_pieces;
       i += int64_t(gridDim.y) * 256) {
    const int64_t row = i / kPieces / 8 * 16 + i / kPieces % 8;
    const int col = i % kPieces;
    const float* fragment = head_accum + ((row / 16 * (kCols / 8) + col) * 32 + row % 8 * 4) * 4;
    float4 sum[4] = {};
    for (int split = 0; split < sizes.num_splits; ++split) {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float4 x = *reinterpret_cast<const float4*>(fragment + 4 * t);
        sum[t].x += x.x, sum[t].y += x.y, sum[t].z += x.z, sum[t].w += x.w;
      }
      fragment += sizes.split_elements();
    }
    const float scale = params.softmax_scale;
    uint32_t upper[4], lower[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      upper[t] = pack<Element>(scale * sum[t].x, scale * sum[t].y);
      lower[t] = pack<Element>(scale * sum[t].z, scale * sum[t].w);
    }
    uint4* target = reinterpret_cast<uint4*>(dq + row * kHeadDim + 8 * col);
    if (row < params.seqlen_q) *target = make_uint4(upper[0], upper[1], upper[2], upper[3]);
    if (row + 8 < params.seqlen_q) {
      target[kHeadDim] = make_uint4(lower[0], lower[1], lower[2], lower[3]);
    }
  }
}

template <typename Sizes>
cudaError_t launch_convert(const BackwardParams& params, const float* dq_accum,
                           cudaStream_t stream) {
  const int64_t blocks = (Sizes(params).padded_rows / 2 * (kHeadDim / 8) + 255) / 256;
  return launch(convert_kernel<Sizes>, head_grid(params, blocks), dim3(256), 0, stream, params,
                dq_accum);
}

// What a launch of the main kernel gets, beside the tensors.
struct MainLaunch {
  unsigned num_blocks;
  const float *lse_log2, *neg_delta;  // [heads, padded_rows]
  float* dq_accum;                    // [splits, heads, padded_rows, kCols]
  int first_n_block;                  // of every head
  int heads_at_once;
};

template <typename Sizes>
void describe_scratch(const BackwardParams& params, WorkspaceLayout& layout) {
  const Sizes sizes(params);
  layout.add<float>("lse_log2", {sizes.heads, sizes.padded_rows});
  layout.add<float>("neg_delta", {sizes.heads, sizes.padded_rows});
  layout.add<float>("dq_accum",
                    {sizes.num_splits, sizes.heads, sizes.padded_rows, int64_t(Sizes::kCols)});
}

// Prepares, calls launch_main(MainLaunch) for blocks of keys that may run side by side, and converts.
template <typename Sizes, typename LaunchMain>
cudaError_t launch_all(const BackwardParams& params, void* workspace, cudaStream_t stream,
                       LaunchMain launch_main) {
  WorkspaceLayout layout;
  describe_scratch<Sizes>(params, layout);
  float* lse_log2 = layout.find<float>(workspace, "lse_log2");
  float* neg_delta = layout.find<float>(workspace, "neg_delta");
  float* dq_accum = layout.find<float>(workspace, "dq_accum");
  const Sizes sizes(params);
  cudaError_t error = launch_prepare<Sizes>(params, lse_log2, neg_delta, dq_accum, stream);
  if (error != cudaSuccess) return error;
  // With deterministic, a launch has one block of keys for each accumulator, and the stream keeps their order.
  const int step = params.deterministic ? sizes.num_splits : sizes.num_n_blocks;
  const int together =
      heads_at_once(params, sizes.padded_rows * Sizes::kCols * int64_t(sizeof(float)));
  for (int n_block = 0; n_block < sizes.num_n_blocks; n_block += step) {
    const unsigned blocks = min(step, sizes.num_n_blocks - n_block);
    error = launch_main(MainLaunch{static_cast<unsigned>(sizes.heads) * blocks, lse_log2, neg_delta,
                                   dq_accum, n_block, together});
    if (error != cudaSuccess) return error;
  }
  return launch_convert<Sizes>(params, dq_accum, stream);
}
