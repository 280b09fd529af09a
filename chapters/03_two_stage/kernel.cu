// 03_two_stage: one outer-K pass, which stages dS in global memory for a second kernel.
//
//   S = softmax_scale · Q Kᵀ    P = exp(S - lse)    dP = dO Vᵀ    dS = P ∘ (dP - delta)
//   dV += Pᵀ dO                 dK += softmax_scale · dSᵀ Q       dQ += softmax_scale · dS K
//
// The change: the outer-K kernel has every tile of dS in its hands and writes it out, so the outer-Q kernel
// only multiplies dS by K (the book's plan B, §16.3.2). Back to 5 products; but dS is N² again,
// and is rounded to the output's dtype on its way through global memory.
//
// Grid: (batch · num_heads, blocks of keys or of queries).
// Block: 128 threads; a tile's elements are dealt out to the threads in row-major order.
// Shared memory: Q, O, dO, K, V tiles and the tiles of P and dS, fp32. Global scratch: dS.
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
constexpr int kElementsM = kBlockM * kHeadDim / kNumThreads;  // of a tile, per thread
constexpr int kElementsN = kBlockN * kHeadDim / kNumThreads;

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

// One [kBlockM, kBlockN] tile of P and dS from the tiles of Q, K, dO and V. The tile of dS also goes to
// staged_ds, the head's [seqlen_q, seqlen_k].
__device__ void recompute_tile(SharedMemory& smem, const BackwardParams& params, int m_start,
                               int n_start, Element* staged_ds) {
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
    const float ds = visible ? p * (dp - smem.delta[row]) : 0.0f;
    smem.sdS[row][col] = ds;
    if (m_start + row < params.seqlen_q && n_start + col < params.seqlen_k) {
      staged_ds[int64_t(m_start + row) * params.seqlen_k + n_start + col] = from_float<Element>(ds);
    }
  }
}

// Outer K: a block owns kBlockN keys and walks over all queries.
__global__ void __launch_bounds__(kNumThreads, 1)
    backward_kernel(const BackwardParams params, Element* staged_ds) {
  SharedMemory& smem = *dynamic_smem<SharedMemory>();
  const Head head(params, blockIdx.x / params.num_heads, blockIdx.x % params.num_heads);
  const int64_t first_row = int64_t(blockIdx.x) * params.seqlen_k;  // of this head in dk and dv
  Element* ds = staged_ds + first_row * params.seqlen_q;            // [seqlen_q, seqlen_k]

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
      recompute_tile(smem, params, m_start, n_start, ds);
      __syncthreads();  // P and dS are complete

      // 5. dV += Pᵀ dO  [kBlockN, kHeadDim]
      add_transposed_product<kNumThreads>(acc_dv, smem.sP, smem.sdO);
      // 6. dK += dSᵀ Q  [kBlockN, kHeadDim]
      add_transposed_product<kNumThreads>(acc_dk, smem.sdS, smem.sQ);
      __syncthreads();  // sQ and sdO are still read by the products
    }

    Element* dk = params.dk + first_row * kHeadDim;
    Element* dv = params.dv + first_row * kHeadDim;
    store_tile<kBlockN, kNumThreads>(dk, acc_dk, params.softmax_scale, n_start, params.seqlen_k);
    store_tile<kBlockN, kNumThreads>(dv, acc_dv, 1.0f, n_start, params.seqlen_k);
  }
}

// Outer Q: a block owns kBlockM queries and walks over all keys; dS comes from global memory.
__global__ void __launch_bounds__(kNumThreads, 1)
    dq_kernel(const BackwardParams params, const Element* staged_ds) {
  SharedMemory& smem = *dynamic_smem<SharedMemory>();  // reserved whole; only sK and sdS are used
  const Head head(params, blockIdx.x / params.num_heads, blockIdx.x % params.num_heads);
  const int64_t first_row = int64_t(blockIdx.x) * params.seqlen_q;  // of this head in dq
  const Element* ds = staged_ds + first_row * params.seqlen_k;      // [seqlen_q, seqlen_k]

  const int num_m_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  for (int m_block = blockIdx.y; m_block < num_m_blocks; m_block += gridDim.y) {
    const int m_start = m_block * kBlockM;
    float acc_dq[kElementsM] = {};

    for (int n_start = 0; n_start < params.seqlen_k; n_start += kBlockN) {
      load_tile<kBlockN, kNumThreads>(smem.sK, head.k, params.k_strides.row, n_start,
                                      params.seqlen_k);
      load_tile<kBlockM, kNumThreads>(smem.sdS, ds + n_start, params.seqlen_k, m_start,
                                      params.seqlen_q, params.seqlen_k - n_start);
      __syncthreads();  // sK and sdS are complete

      // 7. dQ += dS K  [kBlockM, kHeadDim]
      add_product<kNumThreads>(acc_dq, smem.sdS, smem.sK);
      __syncthreads();  // sK and sdS are still read by the product
    }

    Element* dq = params.dq + first_row * kHeadDim;
    store_tile<kBlockM, kNumThreads>(dq, acc_dq, params.softmax_scale, m_start, params.seqlen_q);
  }
}

}  // namespace

void describe_workspace(const BackwardParams& params, WorkspaceLayout& layout) {
  layout.add<Element>("ds", {params.batch, params.num_heads, params.seqlen_q, params.seqlen_k});
}

cudaError_t launch_backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  WorkspaceLayout layout;
  describe_workspace(params, layout);
  Element* ds = layout.find<Element>(workspace, "ds");
  const int num_n_blocks = (params.seqlen_k + kBlockN - 1) / kBlockN;
  const int num_m_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const cudaError_t error = launch(backward_kernel, head_grid(params, num_n_blocks),
                                   dim3(kNumThreads), sizeof(SharedMemory), stream, params, ds);
  if (error != cudaSuccess) return error;
  return launch(dq_kernel, head_grid(params, num_m_blocks), dim3(kNumThreads), sizeof(SharedMemory),
                stream, params, ds);
}
