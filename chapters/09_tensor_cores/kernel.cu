// 09_tensor_cores: the five products run on tensor cores.
//
//   delta = rowsum(O ∘ dO)
//   S = softmax_scale · Q Kᵀ    P = exp(S - lse)    dP = dO Vᵀ    dS = P ∘ (dP - delta)
//   dV += Pᵀ dO                 dK += softmax_scale · dSᵀ Q       dQ_accum[split] += dS K
//   dQ = softmax_scale · Σ dQ_accum[split]
//
// The change: tiles stay 16-bit, and a warp multiplies fragments of them instead of a thread single numbers
// (book §16.6). A warp owns 16 queries of S, P, dP and dS, and 16 keys of dK and dV, so P and dS cross from
// warp to warp through shared memory, rounded to 16 bits, and are read back transposed. The forward pass gets
// the same products, so that backward over forward is a fair ratio.
//
// Grid: (batch · num_heads, splits; without deterministic, blocks of keys; forward: blocks of queries).
// Block: 4 warps. Shared memory: Q, dO, K, V tiles and the tiles of P and dS, 16-bit.
// Global scratch: delta, dq_accum.
#include "common/cuda/alignment.h"
#include "common/cuda/attention.h"
#include "common/cuda/launch.h"
#include "common/cuda/tensor_core.h"

namespace {

static_assert(sizeof(Element) == 2, "tensor cores multiply fp16 or bf16 here; for fp32 use 08");

constexpr int kNumWarps = 4;
constexpr int kNumThreads = 32 * kNumWarps;
constexpr int kBlockM = 16 * kNumWarps;  // queries
constexpr int kBlockN = 16 * kNumWarps;  // keys
constexpr int kMaxSplits = 8;            // with deterministic
constexpr float kLog2e = 1.44269504f;

// A product steps through the head dimension by 16; the columns added to it are zero.
constexpr int kPaddedDim = (kHeadDim + 15) / 16 * 16;
// Rows that are 16 bytes longer than a multiple of 32 spread over the banks: the 8 rows of a matrix that
// ldmatrix loads at once meet no bank conflict.
constexpr int kPadding = 8;
using TileRow = Element[kPaddedDim + kPadding];
using ScoreRow = Element[kBlockN + kPadding];

struct SharedMemory {
  TileRow sQ[kBlockM];
  TileRow sdO[kBlockM];
  TileRow sK[kBlockN];
  TileRow sV[kBlockN];
  ScoreRow sP[kBlockM];
  ScoreRow sdS[kBlockM];
  float lse[kBlockM];
  float delta[kBlockM];
};
static_assert(sizeof(SharedMemory) <= 99 * 1024, "compute capability 8.6 has 99 KB per block");

// ---------------------------------------------------------------- tiles and fragments

// Loads rows [row_start, row_start + kBlock) of a matrix with num_rows rows, 16 bytes at a time. Rows and
// columns past the matrix' end become zeros, so that they add nothing to any product.
template <int kBlock>
__device__ void load_tile(TileRow (&tile)[kBlock], const Element* matrix, int64_t row_stride,
                          int row_start, int num_rows) {
  constexpr int kVectors = kPaddedDim / 8;  // of a row
  for (int i = threadIdx.x; i < kBlock * kVectors; i += kNumThreads) {
    const int row = i / kVectors, col = i % kVectors * 8;
    const bool inside = row_start + row < num_rows && col < kHeadDim;
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (inside) {
      eight = *reinterpret_cast<const uint4*>(matrix + (row_start + row) * row_stride + col);
    }
    *reinterpret_cast<uint4*>(&tile[row][col]) = eight;
  }
}

// acc [16, 8 kTiles] += op(A) op(B), by one warp. `a` and `b` point to their first element in shared memory;
// A is [16, kInner], or [kInner, 16] and transposed; B is [kInner, 8 kTiles], or [8 kTiles, kInner] and
// transposed. Memory holds rows of op(A) and columns of op(B) where ldmatrix wants them if A is not
// transposed and B is; in the other two cases ldmatrix transposes each 8x8 matrix on its way.
template <bool kTransposedA, bool kTransposedB, int kInner, int kTiles>
__device__ void add_product(float (&acc)[kTiles][4], const Element* a, int pitch_a,
                            const Element* b, int pitch_b) {
  const int lane = threadIdx.x % 32;
  // The matrix (lane / 8) that this lane addresses lies at one of these two places, of four 8x8 matrices.
  const int down_first = lane % 16, right_first = lane / 16 * 8;
  const int down_second = lane % 8 + lane / 16 * 8, right_second = lane / 8 % 2 * 8;
#pragma unroll
  for (int k = 0; k < kInner; k += 16) {
    uint32_t fragment_a[4];
    if constexpr (kTransposedA) {
      ldmatrix_trans(fragment_a, a + (k + down_second) * pitch_a + right_second);
    } else {
      ldmatrix(fragment_a, a + down_first * pitch_a + k + right_first);
    }
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      uint32_t fragment_b[4];  // of two tiles
      if constexpr (kTransposedB) {
        ldmatrix(fragment_b, b + (8 * j + down_second) * pitch_b + k + right_second);
      } else {
        ldmatrix_trans(fragment_b, b + (k + down_first) * pitch_b + 8 * j + right_first);
      }
      mma<Element>(acc[j], fragment_a, fragment_b[0], fragment_b[1]);
      mma<Element>(acc[j + 1], fragment_a, fragment_b[2], fragment_b[3]);
    }
  }
}

// Where element `e` of tile `j` of an accumulator lies in the warp's 16 rows.
__device__ int fragment_row(int e) {
  return threadIdx.x % 32 / 4 + e / 2 * 8;
}
__device__ int fragment_col(int j, int e) {
  return 8 * j + threadIdx.x % 4 * 2 + e % 2;
}

// Writes scale · acc, the 16 rows of a warp, as rows [row_start, row_start + 16) of a dense matrix with
// num_rows rows.
__device__ void store_rows(Element* matrix, const float (&acc)[kPaddedDim / 8][4],
                           const float (&scale)[2], int row_start, int num_rows) {
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int row = row_start + fragment_row(e);
      if (row >= num_rows) continue;
      Element* pair = matrix + int64_t(row) * kHeadDim + fragment_col(j, e);
      *reinterpret_cast<uint32_t*>(pair) =
          pack<Element>(scale[e / 2] * acc[j][e], scale[e / 2] * acc[j][e + 1]);
    }
  }
}

// ---------------------------------------------------------------- forward

// Over the four lanes that hold a row of a fragment.
__device__ float row_reduce_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ float row_reduce_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// What is subtracted from S before exp: m itself, but 0 for a row that has seen no key, whose m = -inf would
// make -inf - (-inf) = NaN.
__device__ float finite_max(float row_max) {
  return row_max == -INFINITY ? 0.0f : row_max;
}

// Outer Q, as in 00. A warp owns 16 queries from S to O, so P never leaves its registers: two tiles of the
// accumulator are, rounded, the next product's A.
__global__ void __launch_bounds__(kNumThreads, 1) forward_kernel(const ForwardParams params) {
  SharedMemory& smem = *dynamic_smem<SharedMemory>();
  const int batch = blockIdx.x / params.num_heads, head = blockIdx.x % params.num_heads;
  const Element* q = params.q + params.q_strides.offset(batch, head);  // [seqlen_q, kHeadDim]
  const Element* k = params.k + params.k_strides.offset(batch, head);  // [seqlen_k, kHeadDim]
  const Element* v = params.v + params.v_strides.offset(batch, head);  // [seqlen_k, kHeadDim]
  const int64_t first_row = int64_t(blockIdx.x) * params.seqlen_q;  // of this head in lse and out
  const int warp_row = threadIdx.x / 32 * 16;

  const int num_m_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  for (int m_block = blockIdx.y; m_block < num_m_blocks; m_block += gridDim.y) {
    const int m_start = m_block * kBlockM;
    const int last_row = min(m_start + kBlockM, params.seqlen_q) - 1;
    __syncthreads();  // sQ is still read for the previous m_block
    load_tile(smem.sQ, q, params.q_strides.row, m_start, params.seqlen_q);
    float acc_o[kPaddedDim / 8][4] = {};
    float row_max[2] = {-INFINITY, -INFINITY};  // m and l of rows lane / 4 and lane / 4 + 8
    float row_sum[2] = {0.0f, 0.0f};

    for (int n_start = 0; n_start < params.num_visible_keys(last_row); n_start += kBlockN) {
      __syncthreads();  // sK and sV are still read by the previous tile's products
      load_tile(smem.sK, k, params.k_strides.row, n_start, params.seqlen_k);
      load_tile(smem.sV, v, params.v_strides.row, n_start, params.seqlen_k);
      __syncthreads();  // sQ, sK and sV are complete

      // 1. S = softmax_scale · Q Kᵀ  [16, kBlockN], -inf where the mask hides the key
      float acc_s[kBlockN / 8][4] = {};
      add_product<false, true, kPaddedDim>(acc_s, smem.sQ[warp_row], sizeof(TileRow) / 2,
                                           smem.sK[0], sizeof(TileRow) / 2);
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = m_start + warp_row + fragment_row(e);
          const bool visible = n_start + fragment_col(j, e) < params.num_visible_keys(row);
          acc_s[j][e] = visible ? params.softmax_scale * acc_s[j][e] : -INFINITY;
        }
      }

      // 2. m_new = max(m, rowmax S)   P = exp(S - m_new)   l = exp(m - m_new) · l + rowsum P
      float rescale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float tile_max = -INFINITY;
#pragma unroll
        for (int j = 0; j < kBlockN / 8; ++j) {
          tile_max = fmaxf(tile_max, fmaxf(acc_s[j][2 * half], acc_s[j][2 * half + 1]));
        }
        const float new_max = fmaxf(row_max[half], row_reduce_max(tile_max));
        const float shift = finite_max(new_max);
        float tile_sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kBlockN / 8; ++j) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            acc_s[j][e] = fast_exp2((acc_s[j][e] - shift) * kLog2e);
            tile_sum += acc_s[j][e];
          }
        }
        rescale[half] = fast_exp2((row_max[half] - shift) * kLog2e);
        row_sum[half] = rescale[half] * row_sum[half] + row_reduce_sum(tile_sum);
        row_max[half] = new_max;
      }

      // 3. O = exp(m - m_new) · O + P V  [16, kHeadDim]
#pragma unroll
      for (int j = 0; j < kPaddedDim / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_o[j][e] *= rescale[e / 2];
      }
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int key = 0; key < kBlockN; key += 16) {
        const float (&left)[4] = acc_s[key / 8], (&right)[4] = acc_s[key / 8 + 1];
        const uint32_t p[4] = {pack<Element>(left[0], left[1]), pack<Element>(left[2], left[3]),
                               pack<Element>(right[0], right[1]),
                               pack<Element>(right[2], right[3])};
#pragma unroll
        for (int j = 0; j < kPaddedDim / 8; j += 2) {
          uint32_t fragment_v[4];
          ldmatrix_trans(fragment_v, &smem.sV[key + lane % 16][8 * j + lane / 16 * 8]);
          mma<Element>(acc_o[j], p, fragment_v[0], fragment_v[1]);
          mma<Element>(acc_o[j + 1], p, fragment_v[2], fragment_v[3]);
        }
      }
    }

    // A row without a visible key has l = 0: O = 0 and lse = -inf.
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = row_sum[half] == 0.0f ? 0.0f : 1.0f / row_sum[half];
      const int row = m_start + warp_row + fragment_row(2 * half);
      if (threadIdx.x % 4 != 0 || row >= params.seqlen_q) continue;
      params.lse[first_row + row] =
          row_sum[half] == 0.0f ? -INFINITY : finite_max(row_max[half]) + logf(row_sum[half]);
      if (params.row_max != nullptr) params.row_max[first_row + row] = row_max[half];
      if (params.row_sum != nullptr) params.row_sum[first_row + row] = row_sum[half];
    }
    store_rows(params.out + first_row * kHeadDim, acc_o, scale, m_start + warp_row,
               params.seqlen_q);
  }
}

// ---------------------------------------------------------------- backward

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
  load_tile(smem.sQ, head.q, params.q_strides.row, m_start, n);
  load_tile(smem.sdO, head.dout, params.dout_strides.row, m_start, n);
  const int row = threadIdx.x;
  if (row < kBlockM) {
    smem.lse[row] = m_start + row < n ? head.lse[m_start + row] : 0.0f;
    smem.delta[row] = m_start + row < n ? head.delta[m_start + row] : 0.0f;
  }
}

__device__ void load_keys(SharedMemory& smem, const BackwardParams& params, const Head& head,
                          int n_start) {
  const int n = params.seqlen_k;
  load_tile(smem.sK, head.k, params.k_strides.row, n_start, n);
  load_tile(smem.sV, head.v, params.v_strides.row, n_start, n);
}

// delta = rowsum(O ∘ dO)  [seqlen_q]; kThreadsPerRow neighbouring lanes share a row
constexpr int kThreadsPerRow = kNumThreads / kBlockM;
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

// One [kBlockM, kBlockN] tile of P and dS from the tiles of Q, K, dO and V; each warp its 16 queries.
__device__ void recompute_tile(SharedMemory& smem, const BackwardParams& params, int m_start,
                               int n_start) {
  const bool no_mask = all_visible(params, m_start, n_start);
  const int warp_row = threadIdx.x / 32 * 16;
  // 1. S = Q Kᵀ, not scaled yet
  float acc_s[kBlockN / 8][4] = {};
  add_product<false, true, kPaddedDim>(acc_s, smem.sQ[warp_row], sizeof(TileRow) / 2, smem.sK[0],
                                       sizeof(TileRow) / 2);
  // 3. dP = dO Vᵀ
  float acc_dp[kBlockN / 8][4] = {};
  add_product<false, true, kPaddedDim>(acc_dp, smem.sdO[warp_row], sizeof(TileRow) / 2, smem.sV[0],
                                       sizeof(TileRow) / 2);
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    const int row = warp_row + fragment_row(e);
    const float lse = smem.lse[row], delta = smem.delta[row];
    const int num_visible =
        m_start + row < params.seqlen_q ? params.num_visible_keys(m_start + row) : 0;
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      float p[2], ds[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool visible = no_mask || n_start + fragment_col(j, e + i) < num_visible;
        // 2. P = exp(S - lse), 0 where the mask hides the key and past the last query
        const float s = params.softmax_scale * acc_s[j][e + i];
        p[i] = visible ? fast_exp2((s - lse) * kLog2e) : 0.0f;
        // 4. dS = P ∘ (dP - delta), 0 where P is masked. P = 0 alone is not enough: a hidden dP may be
        // infinite or NaN, and 0 · inf = NaN.
        ds[i] = visible ? p[i] * (acc_dp[j][e + i] - delta) : 0.0f;
      }
      const int col = fragment_col(j, e);
      *reinterpret_cast<uint32_t*>(&smem.sP[row][col]) = pack<Element>(p[0], p[1]);
      *reinterpret_cast<uint32_t*>(&smem.sdS[row][col]) = pack<Element>(ds[0], ds[1]);
    }
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
  const int warp_row =
      threadIdx.x / 32 * 16;  // of the tile: first query of dS, first key of dK and dV

  const int num_n_blocks = (params.seqlen_k + kBlockN - 1) / kBlockN;
  for (int n_block = blockIdx.y; n_block < num_n_blocks; n_block += gridDim.y) {
    const int n_start = n_block * kBlockN;
    load_keys(smem, params, head, n_start);
    float acc_dk[kPaddedDim / 8][4] = {};
    float acc_dv[kPaddedDim / 8][4] = {};

    for (int m_start = first_visible_tile(params, n_start); m_start < params.seqlen_q;
         m_start += kBlockM) {
      load_queries(smem, params, head, m_start);
      __syncthreads();  // sQ, sdO, sK, sV, lse and delta are complete
      recompute_tile(smem, params, m_start, n_start);
      __syncthreads();  // P and dS are complete

      // 5. dV += Pᵀ dO  [16, kHeadDim]
      add_product<true, false, kBlockM>(acc_dv, &smem.sP[0][warp_row], sizeof(ScoreRow) / 2,
                                        smem.sdO[0], sizeof(TileRow) / 2);
      // 6. dK += dSᵀ Q  [16, kHeadDim]
      add_product<true, false, kBlockM>(acc_dk, &smem.sdS[0][warp_row], sizeof(ScoreRow) / 2,
                                        smem.sQ[0], sizeof(TileRow) / 2);

      // 7. dQ_accum += dS K  [16, kHeadDim]
      float acc_dq[kPaddedDim / 8][4] = {};
      add_product<false, false, kBlockN>(acc_dq, smem.sdS[warp_row], sizeof(ScoreRow) / 2,
                                         smem.sK[0], sizeof(TileRow) / 2);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = m_start + warp_row + fragment_row(e);
          if (row < params.seqlen_q) {
            atomicAdd(dq + int64_t(row) * kHeadDim + fragment_col(j, e), acc_dq[j][e]);
          }
        }
      }
      __syncthreads();  // sQ and sdO, and after the last tile sK, are still read by the products
    }

    const float dk_scale[2] = {params.softmax_scale, params.softmax_scale};
    const float dv_scale[2] = {1.0f, 1.0f};
    store_rows(params.dk + first_row * kHeadDim, acc_dk, dk_scale, n_start + warp_row,
               params.seqlen_k);
    store_rows(params.dv + first_row * kHeadDim, acc_dv, dv_scale, n_start + warp_row,
               params.seqlen_k);
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

void describe_workspace(const ForwardParams&, WorkspaceLayout&) {}

cudaError_t launch_forward(const ForwardParams& params, void*, cudaStream_t stream) {
  if (!rows_are_aligned(params)) return cudaErrorInvalidValue;
  const int num_m_blocks = (params.seqlen_q + kBlockM - 1) / kBlockM;
  return launch(forward_kernel, head_grid(params, num_m_blocks), dim3(kNumThreads),
                sizeof(SharedMemory), stream, params);
}

void describe_workspace(const BackwardParams& params, WorkspaceLayout& layout) {
  layout.add<float>("delta", {params.batch, params.num_heads, params.seqlen_q});
  layout.add<float>(
      "dq_accum", {num_splits(params), params.batch, params.num_heads, params.seqlen_q, kHeadDim});
}

cudaError_t launch_backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  if (!rows_are_aligned(params)) return cudaErrorInvalidValue;
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
