// 00_forward: the forward pass that every backward pass starts from.
//
//   S = softmax_scale · Q Kᵀ      P = softmax(S)      O = P V      lse = m + log l
//
// Outer loop over queries, inner loop over keys: a block keeps kBlockM rows of O in registers and their
// running maximum m and sum l in shared memory, so each row of O is finished by one block and written once
// (FlashAttention-2, algorithm 1; book §14.5, §16.4).
//
// Grid: (batch · num_heads, blocks of kBlockM queries). Block: 128 threads; a tile's elements are dealt out
// to the threads in row-major order.
// Shared memory: Q, K, V tiles and the tile of scores, fp32.
#include "common/cuda/attention.h"
#include "common/cuda/launch.h"
#include "common/cuda/tile.h"

namespace {

// Launch bounds are (128, 1): left to itself, ptxas spills registers to fit more blocks on an SM.
constexpr int kNumThreads = 128;
constexpr int kBlockM = 32;  // queries
constexpr int kBlockN = 32;  // keys
constexpr int kThreadsPerRow = kNumThreads / kBlockM;
constexpr int kElementsM = kBlockM * kHeadDim / kNumThreads;  // of a tile, per thread

struct SharedMemory {
  TileRow sQ[kBlockM];
  TileRow sK[kBlockN];
  TileRow sV[kBlockN];
  float sP[kBlockM][kBlockN + 1];  // first S, then P in its place
  float row_max[kBlockM];          // m: over the keys seen so far
  float row_sum[kBlockM];          // l: sum of exp(S - m) over the keys seen so far
  float rescale[kBlockM];          // exp(m_old - m_new) of the current step
};
static_assert(sizeof(SharedMemory) <= 64 * 1024, "a T4 has 64 KB of shared memory per block");

// Reductions over the kThreadsPerRow neighbouring lanes that share a row.
__device__ float row_reduce_max(float x) {
  for (int offset = kThreadsPerRow / 2; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
  }
  return x;
}

__device__ float row_reduce_sum(float x) {
  for (int offset = kThreadsPerRow / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffff, x, offset);
  }
  return x;
}

// What is subtracted from S before exp: m itself, but 0 for a row that has seen no key, whose m = -inf would
// make -inf - (-inf) = NaN.
__device__ float finite_max(float row_max) {
  return row_max == -INFINITY ? 0.0f : row_max;
}

__global__ void __launch_bounds__(kNumThreads, 1) forward_kernel(const ForwardParams params) {
  SharedMemory& smem = *dynamic_smem<SharedMemory>();
  const int batch = blockIdx.x / params.num_heads, head = blockIdx.x % params.num_heads;
  const Element* q = params.q + params.q_strides.offset(batch, head);  // [seqlen_q, kHeadDim]
  const Element* k = params.k + params.k_strides.offset(batch, head);  // [seqlen_k, kHeadDim]
  const Element* v = params.v + params.v_strides.offset(batch, head);  // [seqlen_k, kHeadDim]
  const int64_t first_row = int64_t(blockIdx.x) * params.seqlen_q;  // of this head in lse and out

  const int num_m_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  for (int m_block = blockIdx.y; m_block < num_m_blocks; m_block += gridDim.y) {
    const int m_start = m_block * kBlockM;
    __syncthreads();  // row_max and row_sum are still read for the previous m_block
    load_tile<kBlockM, kNumThreads>(smem.sQ, q, params.q_strides.row, m_start, params.seqlen_q);
    if (threadIdx.x < kBlockM) {
      smem.row_max[threadIdx.x] = -INFINITY;
      smem.row_sum[threadIdx.x] = 0.0f;
    }
    float acc_o[kElementsM] = {};

    for (int n_start = 0; n_start < params.seqlen_k; n_start += kBlockN) {
      __syncthreads();  // sP, sV and rescale are still read by the previous tile's step 3
      load_tile<kBlockN, kNumThreads>(smem.sK, k, params.k_strides.row, n_start, params.seqlen_k);
      load_tile<kBlockN, kNumThreads>(smem.sV, v, params.v_strides.row, n_start, params.seqlen_k);
      __syncthreads();  // sQ, sK, sV and the initial row_max and row_sum are complete

      // 1. S = softmax_scale · Q Kᵀ  [kBlockM, kBlockN], -inf where the mask hides the key
      for (int i = threadIdx.x; i < kBlockM * kBlockN; i += kNumThreads) {
        const int row = i / kBlockN, col = i % kBlockN;
        float s = 0.0f;
#pragma unroll 8  // unrolling in full takes nvcc three times as long
        for (int x = 0; x < kHeadDim; ++x) s += smem.sQ[row][x] * smem.sK[col][x];
        const bool visible = n_start + col < params.num_visible_keys(m_start + row);
        smem.sP[row][col] = visible ? params.softmax_scale * s : -INFINITY;
      }
      __syncthreads();  // every row of S is complete

      // 2. m_new = max(m, rowmax S)   P = exp(S - m_new)   l = exp(m - m_new) · l + rowsum P
      const int row = threadIdx.x / kThreadsPerRow, lane = threadIdx.x % kThreadsPerRow;
      float tile_max = -INFINITY;
      for (int col = lane; col < kBlockN; col += kThreadsPerRow) {
        tile_max = fmaxf(tile_max, smem.sP[row][col]);
      }
      const float old_max = smem.row_max[row];
      const float new_max = fmaxf(old_max, row_reduce_max(tile_max));
      const float shift = finite_max(new_max);
      float tile_sum = 0.0f;
      for (int col = lane; col < kBlockN; col += kThreadsPerRow) {
        const float p = expf(smem.sP[row][col] - shift);
        smem.sP[row][col] = p;
        tile_sum += p;
      }
      tile_sum = row_reduce_sum(tile_sum);
      __syncwarp();  // row_max is read by every lane of the row; a shuffle alone orders no memory
      if (lane == 0) {
        const float rescale = expf(old_max - shift);
        smem.rescale[row] = rescale;
        smem.row_sum[row] = rescale * smem.row_sum[row] + tile_sum;
        smem.row_max[row] = new_max;
      }
      __syncthreads();  // P, the new statistics and the rescaling factors are complete

      // 3. O = exp(m - m_new) · O + P V  [kBlockM, kHeadDim]
#pragma unroll
      for (int j = 0; j < kElementsM; ++j) {
        acc_o[j] *= smem.rescale[(threadIdx.x + j * kNumThreads) / kHeadDim];
      }
      add_product<kNumThreads>(acc_o, smem.sP, smem.sV);
    }

    // A row without a visible key has l = 0: O = 0 and lse = -inf.
#pragma unroll
    for (int j = 0; j < kElementsM; ++j) {
      const int row = (threadIdx.x + j * kNumThreads) / kHeadDim;
      acc_o[j] = smem.row_sum[row] == 0.0f ? 0.0f : acc_o[j] / smem.row_sum[row];
    }
    store_tile<kBlockM, kNumThreads>(params.out + first_row * kHeadDim, acc_o, 1.0f, m_start,
                                     params.seqlen_q);
    const int row = threadIdx.x;
    if (row < kBlockM && m_start + row < params.seqlen_q) {
      const float row_max = smem.row_max[row], row_sum = smem.row_sum[row];
      params.lse[first_row + m_start + row] =
          row_sum == 0.0f ? -INFINITY : finite_max(row_max) + logf(row_sum);
      if (params.row_max != nullptr) params.row_max[first_row + m_start + row] = row_max;
      if (params.row_sum != nullptr) params.row_sum[first_row + m_start + row] = row_sum;
    }
  }
}

}  // namespace

void describe_workspace(const ForwardParams&, WorkspaceLayout&) {}

cudaError_t launch_forward(const ForwardParams& params, void*, cudaStream_t stream) {
  const int num_m_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  return launch(forward_kernel, head_grid(params, num_m_blocks), dim3(kNumThreads),
                sizeof(SharedMemory), stream, params);
}
