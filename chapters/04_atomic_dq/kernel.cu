// 04_atomic_dq: dQ is added up in place, in the output's dtype, by atomics.
//
//   S = softmax_scale · Q Kᵀ    P = exp(S - lse)    dP = dO Vᵀ    dS = P ∘ (dP - delta)
//   dV += Pᵀ dO                 dK += softmax_scale · dSᵀ Q       dQ += softmax_scale · dS K
//
// The change: the staged dS and the second kernel are gone. Every block adds its share of dQ to global
// memory, where the blocks of all keys meet (the book's plan A, §16.3.1). In 16 bits every addition rounds,
// so dQ gets worse with every K block; and the order of the additions changes the last bits on every run.
//
// Grid: (batch · num_heads, blocks of keys).
// Block: 128 threads; a tile's elements are dealt out to the threads in row-major order.
// Shared memory: Q, O, dO, K, V tiles and the tiles of P and dS, fp32.
#include "common/cuda/atomic.h"
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
__global__ void __launch_bounds__(kNumThreads, 1) backward_kernel(const BackwardParams params) {
  SharedMemory& smem = *dynamic_smem<SharedMemory>();
  const Head head(params, blockIdx.x / params.num_heads, blockIdx.x % params.num_heads);
  const int64_t first_row = int64_t(blockIdx.x) * params.seqlen_k;  // of this head in dk and dv
  Element* dq = params.dq + int64_t(blockIdx.x) * params.seqlen_q * kHeadDim;

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

      // 7. dQ += softmax_scale · dS K  [kBlockM, kHeadDim], two neighbouring elements at a time
      for (int i = 2 * threadIdx.x; i < kBlockM * kHeadDim; i += 2 * kNumThreads) {
        const int row = i / kHeadDim, col = i % kHeadDim;
        float x = 0.0f, y = 0.0f;
#pragma unroll 8
        for (int n = 0; n < kBlockN; ++n) {
          x += smem.sdS[row][n] * smem.sK[n][col];
          y += smem.sdS[row][n] * smem.sK[n][col + 1];
        }
        if (m_start + row < params.seqlen_q) {
          atomic_add_pair(dq + int64_t(m_start) * kHeadDim + i, params.softmax_scale * x,
                          params.softmax_scale * y);
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

}  // namespace

void describe_workspace(const BackwardParams&, WorkspaceLayout&) {}

cudaError_t launch_backward(const BackwardParams& params, void*, cudaStream_t stream) {
  const size_t dq_bytes =
      sizeof(Element) * params.batch * params.num_heads * params.seqlen_q * kHeadDim;
  const cudaError_t error = cudaMemsetAsync(params.dq, 0, dq_bytes, stream);
  if (error != cudaSuccess) return error;
  const int num_n_blocks = (params.seqlen_k + kBlockN - 1) / kBlockN;
  return launch(backward_kernel, head_grid(params, num_n_blocks), dim3(kNumThreads),
                sizeof(SharedMemory), stream, params);
}
