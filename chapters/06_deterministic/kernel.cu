// 06_deterministic: with deterministic, dQ has one accumulator per split of the keys, summed in fixed order.
//
//   S = softmax_scale · Q Kᵀ    P = exp(S - lse)    dP = dO Vᵀ    dS = P ∘ (dP - delta)
//   dV += Pᵀ dO                 dK += softmax_scale · dSᵀ Q       dQ_accum[split] += dS K
//   dQ = softmax_scale · Σ dQ_accum[split]
//
// The change: blocks that could meet in an accumulator get one each. A split is what one block does: it
// strides over the K blocks split, split + num_splits, …, and nobody else adds to its accumulator
// (book §16.3). FA2 takes ⌈SMs / (batch · heads)⌉ splits, so its bits depend on the batch and the card;
// here their number is a function of seqlen_k alone. With deterministic at most kMaxSplits blocks work per
// head; 8 is a compromise: memory grows with the number of accumulators, parallelism with that of blocks.
// Without deterministic nothing changes against 05.
//
// Grid of backward_kernel: (batch · num_heads, splits; without deterministic, blocks of keys).
// Block: 128 threads; a tile's elements are dealt out to the threads in row-major order.
// Shared memory: Q, O, dO, K, V tiles and the tiles of P and dS, fp32. Global scratch: dq_accum.
#include "common/cuda/attention.h"
#include "common/cuda/launch.h"
#include "common/cuda/tile.h"

namespace {

// Launch bounds are (128, 1): left to itself, ptxas spills registers to fit more blocks on an SM.
constexpr int kNumThreads = 128;
// Above head_dim 80, tiles of 32 queries would not fit into 64 KB of shared memory.
constexpr int kBlockM = kHeadDim <= 80 ? 32 : 16;  // queries
constexpr int kBlockN = 32;                        // keys
constexpr int kThreadsPerRow = kNumThreads / kBlockM;
constexpr int kElementsN = kBlockN * kHeadDim / kNumThreads;  // of a tile, per thread
constexpr int kMaxSplits = 8;                                 // with deterministic

struct SharedMemory {
  TileRow sQ[kBlockM];
  TileRow sO[kBlockM];
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
  const Element *q, *out, *dout;  // [seqlen_q, kHeadDim]
  const Element *k, *v;           // [seqlen_k, kHeadDim]
  const float* lse;               // [seqlen_q]

  __device__ Head(const BackwardParams& params, int batch, int head)
      : q(params.q + params.q_strides.offset(batch, head)),
        out(params.out + params.out_strides.offset(batch, head)),
        dout(params.dout + params.dout_strides.offset(batch, head)),
        k(params.k + params.k_strides.offset(batch, head)),
        v(params.v + params.v_strides.offset(batch, head)),
        lse(params.lse + (int64_t(batch) * params.num_heads + head) * params.seqlen_q) {}
};

__device__ void load_queries(SharedMemory& smem, const BackwardParams& params, const Head& head,
                             int m_start) {
  const int n = params.seqlen_q;
  load_tile<kBlockM, kNumThreads>(smem.sQ, head.q, params.q_strides.row, m_start, n);
  load_tile<kBlockM, kNumThreads>(smem.sO, head.out, params.out_strides.row, m_start, n);
  load_tile<kBlockM, kNumThreads>(smem.sdO, head.dout, params.dout_strides.row, m_start, n);
  const int row = threadIdx.x;
  if (row < kBlockM) smem.lse[row] = m_start + row < n ? head.lse[m_start + row] : 0.0f;
}

__device__ void load_keys(SharedMemory& smem, const BackwardParams& params, const Head& head,
                          int n_start) {
  const int n = params.seqlen_k;
  load_tile<kBlockN, kNumThreads>(smem.sK, head.k, params.k_strides.row, n_start, n);
  load_tile<kBlockN, kNumThreads>(smem.sV, head.v, params.v_strides.row, n_start, n);
}

// delta = rowsum(O ∘ dO)  [kBlockM]; kThreadsPerRow neighbouring lanes share a row
__device__ void compute_delta(SharedMemory& smem) {
  const int row = threadIdx.x / kThreadsPerRow, lane = threadIdx.x % kThreadsPerRow;
  float sum = 0.0f;
  for (int x = lane; x < kHeadDim; x += kThreadsPerRow) sum += smem.sO[row][x] * smem.sdO[row][x];
  for (int offset = kThreadsPerRow / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, offset);
  }
  if (lane == 0) smem.delta[row] = sum;
}

// One [kBlockM, kBlockN] tile of P and dS from the tiles of Q, K, dO and V.
__device__ void recompute_tile(SharedMemory& smem, const BackwardParams& params, int m_start,
                               int n_start) {
  for (int i = threadIdx.x; i < kBlockM * kBlockN; i += kNumThreads) {
    const int row = i / kBlockN, col = i % kBlockN;
    // 1. S = softmax_scale · Q Kᵀ
    float s = 0.0f;
#pragma unroll 8  // unrolling in full takes nvcc three times as long
    for (int x = 0; x < kHeadDim; ++x) s += smem.sQ[row][x] * smem.sK[col][x];
    s *= params.softmax_scale;
    // 2. P = exp(S - lse), 0 where the mask hides the key and past the last query
    const bool visible =
        m_start + row < params.seqlen_q && n_start + col < params.num_visible_keys(m_start + row);
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
    backward_kernel(const BackwardParams params, float* dq_accum) {
  SharedMemory& smem = *dynamic_smem<SharedMemory>();
  const Head head(params, blockIdx.x / params.num_heads, blockIdx.x % params.num_heads);
  const int64_t first_row = int64_t(blockIdx.x) * params.seqlen_k;  // of this head in dk and dv
  const int64_t split = params.deterministic ? blockIdx.y : 0;
  float* dq = dq_accum + (split * gridDim.x + blockIdx.x) * params.seqlen_q * kHeadDim;

  const int num_n_blocks = (params.seqlen_k + kBlockN - 1) / kBlockN;
  for (int n_block = blockIdx.y; n_block < num_n_blocks; n_block += gridDim.y) {
    const int n_start = n_block * kBlockN;
    load_keys(smem, params, head, n_start);
    float acc_dk[kElementsN] = {};
    float acc_dv[kElementsN] = {};

    for (int m_start = 0; m_start < params.seqlen_q; m_start += kBlockM) {
      load_queries(smem, params, head, m_start);
      __syncthreads();  // sQ, sO, sdO, sK, sV and lse are complete
      compute_delta(smem);
      __syncthreads();  // delta is complete
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
  layout.add<float>(
      "dq_accum", {num_splits(params), params.batch, params.num_heads, params.seqlen_q, kHeadDim});
}

cudaError_t launch_backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  WorkspaceLayout layout;
  describe_workspace(params, layout);
  float* dq_accum = layout.find<float>(workspace, "dq_accum");
  cudaError_t error = cudaMemsetAsync(dq_accum, 0, layout.bytes("dq_accum"), stream);
  if (error != cudaSuccess) return error;
  const int num_n_blocks = (params.seqlen_k + kBlockN - 1) / kBlockN;
  const int num_blocks = params.deterministic ? num_splits(params) : num_n_blocks;
  error = launch(backward_kernel, head_grid(params, num_blocks), dim3(kNumThreads),
                 sizeof(SharedMemory), stream, params, dq_accum);
  if (error != cudaSuccess) return error;
  const int64_t num_convert_blocks =
      (int64_t(params.seqlen_q) * kHeadDim + kNumThreads - 1) / kNumThreads;
  return launch(convert_kernel, head_grid(params, num_convert_blocks), dim3(kNumThreads), 0, stream,
                params, dq_accum, num_splits(params));
}
