// 08_preprocess_delta: delta = rowsum(O ∘ dO) is computed once, by a kernel of its own.
//
//   delta = rowsum(O ∘ dO)
//   S = softmax_scale · Q Kᵀ    P = exp(S - lse)    dP = dO Vᵀ    dS = P ∘ (dP - delta)
//   dV += Pᵀ dO                 dK += softmax_scale · dSᵀ Q       dQ_accum[split] += dS K
//   dQ = softmax_scale · Σ dQ_accum[split]
//
// The change: every block of keys used to load O, tile by tile, only to compute the same delta again
// (book §16.8). Now O is read once in all, and its tile is gone from shared memory.
//
// Grid of backward_kernel: (batch · num_heads, splits; without deterministic, blocks of keys).
// Block: 128 threads; a tile's elements are dealt out to the threads in row-major order.
// Shared memory: Q, dO, K, V tiles and the tiles of P and dS, fp32. Global scratch: delta, dq_accum.
#include "common/cuda/attention.h"
#include "common/cuda/launch.h"
#include "common/cuda/tile.h"

namespace {

// Launch bounds are (128, 1): left to itself, ptxas spills registers to fit more blocks on an SM.
constexpr int kNumThreads = 128;
// 16 above head_dim 80, as in 07. Without O's tile, 32 queries would fit into 64 KB up to head_dim 104.
constexpr int kBlockM = kHeadDim <= 80 ? 32 : 16;  // queries
constexpr int kBlockN = 32;                        // keys
constexpr int kThreadsPerRow = kNumThreads / kBlockM;
constexpr int kElementsN = kBlockN * kHeadDim / kNumThreads;  // of a tile, per thread
constexpr int kMaxSplits = 8;                                 // with deterministic

struct SharedMemory {
  TileRow sQ[kBlockM];
  TileRow sdO[kBlockM];
  TileRow sK[kBlockN];
  TileRow sV[kBlockN];
  float sP[kBlockM][kBlockN + 1];
  float sdS[kBlockM][kBlockN + 1];
  float lse[kBlockM];
  float delta[kBlockM];
};
static_assert(sizeof(SharedMemory) <= 64 * 1024, "a T4 has 64 KB of shared memory per block");

// The tensors of one head.
struct Head {
  const Element *q, *dout;   // [seqlen_q, kHeadDim]
  const Element *k, *v;      // [seqlen_k, kHeadDim]
  const float *lse, *delta;  // [seqlen_q]

  __device__ Head(const BackwardParams& params, const float* delta, int batch, int head)
      : q(params.q + params.q_strides.offset(batch, head)),
        dout(params.dout + params.dout_strides.offset(batch, head)),
        k(params.k + params.k_strides.offset(batch, head)),
        v(params.v + params.v_strides.offset(batch, head)),
        lse(params.lse + (int64_t(batch) * params.num_heads + head) * params.seqlen_q),
        delta(delta + (int64_t(batch) * params.num_heads + head) * params.seqlen_q) {}
};

__device__ void load_queries(SharedMemory& smem, const BackwardParams& params, const Head& head,
                             int m_start) {
  const int n = params.seqlen_q;
  load_tile<kBlockM, kNumThreads>(smem.sQ, head.q, params.q_strides.row, m_start, n);
  load_tile<kBlockM, kNumThreads>(smem.sdO, head.dout, params.dout_strides.row, m_start, n);
  const int row = threadIdx.x;
  if (row < kBlockM) {
    smem.lse[row] = m_start + row < n ? head.lse[m_start + row] : 0.0f;
    smem.delta[row] = m_start + row < n ? head.delta[m_start + row] : 0.0f;
  }
}

__device__ void load_keys(SharedMemory& smem, const BackwardParams& params, const Head& head,
                          int n_start) {
  const int n = params.seqlen_k;
  load_tile<kBlockN, kNumThreads>(smem.sK, head.k, params.k_strides.row, n_start, n);
  load_tile<kBlockN, kNumThreads>(smem.sV, head.v, params.v_strides.row, n_start, n);
}

// delta = rowsum(O ∘ dO)  [seqlen_q]; kThreadsPerRow neighbouring lanes share a row
__global__ void __launch_bounds__(kNumThreads, 1)
    delta_kernel(const BackwardParams params, float* delta) {
  const int batch = blockIdx.x / params.num_heads, head = blockIdx.x % params.num_heads;
  const Element* out = params.out + params.out_strides.offset(batch, head);
  const Element* dout = params.dout + params.dout_strides.offset(batch, head);
  const int num_m_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  for (int m_block = blockIdx.y; m_block < num_m_blocks; m_block += gridDim.y) {
    const int row = m_block * kBlockM + threadIdx.x / kThreadsPerRow;
    const int lane = threadIdx.x % kThreadsPerRow;
    float sum = 0.0f;
    for (int x = lane; x < kHeadDim && row < params.seqlen_q; x += kThreadsPerRow) {
      sum += to_float(out[row * params.out_strides.row + x]) *
             to_float(dout[row * params.dout_strides.row + x]);
    }
    for (int offset = kThreadsPerRow / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, offset);
    }
    const int64_t first_row = int64_t(blockIdx.x) * params.seqlen_q;
    if (lane == 0 && row < params.seqlen_q) delta[first_row + row] = sum;
  }
}

// First row of the first query tile in which some query sees key n_start. Queries see the keys up to
// row + seqlen_k - seqlen_q.
__device__ int first_visible_tile(const BackwardParams& params, int n_start) {
  const int first_row = params.is_causal ? n_start - (params.seqlen_k - params.seqlen_q) : 0;
  return max(first_row, 0) / kBlockM * kBlockM;
}

// Whether every query of the tile exists and sees every key of it. The tile's first query sees the fewest
// keys, so it is enough to ask for that one.
__device__ bool all_visible(const BackwardParams& params, int m_start, int n_start) {
  return m_start + kBlockM <= params.seqlen_q &&
         n_start + kBlockN <= params.num_visible_keys(m_start);
}

// One [kBlockM, kBlockN] tile of P and dS from the tiles of Q, K, dO and V.
__device__ void recompute_tile(SharedMemory& smem, const BackwardParams& params, int m_start,
                               int n_start) {
  const bool no_mask = all_visible(params, m_start, n_start);
  for (int i = threadIdx.x; i < kBlockM * kBlockN; i += kNumThreads) {
    const int row = i / kBlockN, col = i % kBlockN;
    // 1. S = softmax_scale · Q Kᵀ
    float s = 0.0f;
#pragma unroll 8  // unrolling in full takes nvcc three times as long
    for (int x = 0; x < kHeadDim; ++x) s += smem.sQ[row][x] * smem.sK[col][x];
    s *= params.softmax_scale;
    // 2. P = exp(S - lse), 0 where the mask hides the key and past the last query
    const bool visible = no_mask || (m_start + row < params.seqlen_q &&
                                     n_start + col < params.num_visible_keys(m_start + row));
    const float p = visible ? expf(s - smem.lse[row]) : 0.0f;
    // 3. dP = dO Vᵀ
    float dp = 0.0f;
#pragma unroll 8
    for (int x = 0; x < kHeadDim; ++x) dp += smem.sdO[row][x] * smem.sV[col][x];
    // 4. dS = P ∘ (dP - delta), 0 where P is masked. P = 0 alone is not enough: a hidden dP may be
    // infinite or NaN, and 0 · inf = NaN.
    smem.sP[row][col] = p;
    smem.sdS[row][col] = visible ? p * (dp - smem.delta[row]) : 0.0f;
  }
}

// Outer K: a block owns kBlockN keys and walks over all queries.
__global__ void __launch_bounds__(kNumThreads, 1)
    backward_kernel(const BackwardParams params, const float* delta, float* dq_accum) {
  SharedMemory& smem = *dynamic_smem<SharedMemory>();
  const Head head(params, delta, blockIdx.x / params.num_heads, blockIdx.x % params.num_heads);
  const int64_t first_row = int64_t(blockIdx.x) * params.seqlen_k;  // of this head in dk and dv
  const int64_t split = params.deterministic ? blockIdx.y : 0;
  float* dq = dq_accum + (split * gridDim.x + blockIdx.x) * params.seqlen_q * kHeadDim;

  const int num_n_blocks = (params.seqlen_k + kBlockN - 1) / kBlockN;
  for (int n_block = blockIdx.y; n_block < num_n_blocks; n_block += gridDim.y) {
    const int n_start = n_block * kBlockN;
    load_keys(smem, params, head, n_start);
    float acc_dk[kElementsN] = {};
    float acc_dv[kElementsN] = {};

    for (int m_start = first_visible_tile(params, n_start); m_start < params.seqlen_q;
         m_start += kBlockM) {
      load_queries(smem, params, head, m_start);
      __syncthreads();  // sQ, sdO, sK, sV, lse and delta are complete
      recompute_tile(smem, params, m_start, n_start);
      __syncthreads();  // P and dS are complete

      // 5. dV += Pᵀ dO  [kBlockN, kHeadDim]
      add_transposed_product<kNumThreads>(acc_dv, smem.sP, smem.sdO);
      // 6. dK += dSᵀ Q  [kBlockN, kHeadDim]
      add_transposed_product<kNumThreads>(acc_dk, smem.sdS, smem.sQ);

      // 7. dQ_accum += dS K  [kBlockM, kHeadDim]
      for (int i = threadIdx.x; i < kBlockM * kHeadDim; i += kNumThreads) {
        const int row = i / kHeadDim, col = i % kHeadDim;
        float sum = 0.0f;
#pragma unroll 8
        for (int n = 0; n < kBlockN; ++n) sum += smem.sdS[row][n] * smem.sK[n][col];
        if (m_start + row < params.seqlen_q) {
          atomicAdd(dq + int64_t(m_start) * kHeadDim + i, sum);
        }
      }
      __syncthreads();  // sQ and sdO, and after the last tile sK, are still read by the products
    }

    Element* dk = params.dk + first_row * kHeadDim;
    Element* dv = params.dv + first_row * kHeadDim;
    store_tile<kBlockN, kNumThreads>(dk, acc_dk, params.softmax_scale, n_start, params.seqlen_k);
    store_tile<kBlockN, kNumThreads>(dv, acc_dv, 1.0f, n_start, params.seqlen_k);
  }
}

// The number of accumulators, and with deterministic of the blocks per head.
int num_splits(const BackwardParams& params) {
  const int num_n_blocks = (params.seqlen_k + kBlockN - 1) / kBlockN;
  return params.deterministic ? min(num_n_blocks, kMaxSplits) : 1;
}

// dQ = softmax_scale · Σ dQ_accum[split], in the order of the splits, rounded to the output's dtype
__global__ void __launch_bounds__(kNumThreads, 1)
    convert_kernel(const BackwardParams params, const float* dq_accum, int num_splits) {
  const int64_t num_elements = int64_t(params.seqlen_q) * kHeadDim;  // of one head
  for (int64_t i = int64_t(blockIdx.y) * kNumThreads + threadIdx.x; i < num_elements;
       i += int64_t(gridDim.y) * kNumThreads) {
    const int64_t index = blockIdx.x * num_elements + i;
    float sum = 0.0f;
    for (int split = 0; split < num_splits; ++split) {
      sum += dq_accum[split * gridDim.x * num_elements + index];
    }
    params.dq[index] = from_float<Element>(params.softmax_scale * sum);
  }
}

}  // namespace

void describe_workspace(const BackwardParams& params, WorkspaceLayout& layout) {
  layout.add<float>("delta", {params.batch, params.num_heads, params.seqlen_q});
  layout.add<float>(
      "dq_accum", {num_splits(params), params.batch, params.num_heads, params.seqlen_q, kHeadDim});
}

cudaError_t launch_backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  WorkspaceLayout layout;
  describe_workspace(params, layout);
  float* delta = layout.find<float>(workspace, "delta");
  float* dq_accum = layout.find<float>(workspace, "dq_accum");
  cudaError_t error = cudaMemsetAsync(dq_accum, 0, layout.bytes("dq_accum"), stream);
  if (error != cudaSuccess) return error;
  const int num_m_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  error = launch(delta_kernel, head_grid(params, num_m_blocks), dim3(kNumThreads), 0, stream,
                 params, delta);
  if (error != cudaSuccess) return error;
  const int num_n_blocks = (params.seqlen_k + kBlockN - 1) / kBlockN;
  const int num_blocks = params.deterministic ? num_splits(params) : num_n_blocks;
  error = launch(backward_kernel, head_grid(params, num_blocks), dim3(kNumThreads),
                 sizeof(SharedMemory), stream, params, delta, dq_accum);
  if (error != cudaSuccess) return error;
  const int64_t num_convert_blocks =
      (int64_t(params.seqlen_q) * kHeadDim + kNumThreads - 1) / kNumThreads;
  return launch(convert_kernel, head_grid(params, num_convert_blocks), dim3(kNumThreads), 0, stream,
                params, dq_accum, num_splits(params));
}
