// 10_async_pipeline: copies, products and additions overlap.
//
//   delta = rowsum(O ∘ dO)
//   Sᵀ = softmax_scale · K Qᵀ   Pᵀ = exp(Sᵀ - lse)   dPᵀ = V dOᵀ   dSᵀ = Pᵀ ∘ (dPᵀ - delta)
//   dV += Pᵀ dO                 dK += softmax_scale · dSᵀ Q        dQ_accum[split] += dS K
//   dQ = softmax_scale · Σ dQ_accum[split]
//
// The change: nothing waits that need not. While a tile of queries is multiplied, the next one is on its way
// (cp.async, two stages). A warp owns 16 keys, of S and dP too: transposed, Pᵀ and dSᵀ are at once the A of
// dV and dK, and only dS crosses from warp to warp, into the dQ of the next iteration. That leaves one barrier
// per tile. Tiles are swizzled instead of padded; dQ_accum holds fragments as the registers do, so that a warp
// adds 512 bytes in one piece; the blocks with the most queries come first, of as many heads as the L2 cache
// keeps dQ_accum of. What 11 needs unchanged is in common/cuda: swizzle.h, warp_product.h, schedule.h, and
// dq_accumulator.h with the kernels before and after the main one.
//
// Grid: (batch · num_heads · blocks of keys; with deterministic, splits). Block: a warp for every 16 keys.
// Shared memory: K, V; two stages of Q, dO, dS. Global scratch: lse_log2, neg_delta, dq_accum.
#include "common/cuda/alignment.h"
#include "common/cuda/architecture.h"
#include "common/cuda/async_copy.h"
#include "common/cuda/attention.h"
#include "common/cuda/dq_accumulator.h"
#include "common/cuda/launch.h"
#include "common/cuda/schedule.h"
#include "common/cuda/swizzle.h"
#include "common/cuda/tensor_core.h"
#include "common/cuda/warp_product.h"

namespace {

static_assert(sizeof(Element) == 2, "tensor cores multiply fp16 or bf16 here; for fp32 use 08");

constexpr int kPaddedDim = kHeadDim <= 64 ? 64 : 128;  // a tile's row is 128 or 256 bytes
constexpr int kNumStages = 2;

// The largest tiles that fit: queries and keys.
struct TileShape {
  int m, n;
};
constexpr TileShape tile_shape() {
  if (kPaddedDim == 64) return TileShape{kMaxSharedBytes >= 227 * 1024 ? 128 : 64, 128};
  return kMaxSharedBytes >= 163 * 1024 ? TileShape{64, 128} : TileShape{32, 64};
}
constexpr int kBlockM = tile_shape().m;
constexpr int kBlockN = tile_shape().n;
constexpr int kNumWarps = kBlockN / 16;
constexpr int kNumThreads = 32 * kNumWarps;
using Sizes = BackwardSizes<kBlockM, kBlockN, kPaddedDim>;

// A warp's share of dQ.
constexpr int kRowsDq = 32;
constexpr int kColsDq = kBlockM * kPaddedDim / kRowsDq / kNumWarps;

struct SharedMemory {
  Element sK[kBlockN][kPaddedDim];
  Element sV[kBlockN][kPaddedDim];
  Element sQ[kNumStages][kBlockM][kPaddedDim];
  Element sdO[kNumStages][kBlockM][kPaddedDim];
  Element sdS[kNumStages][kBlockN][kBlockM];  // transposed: a row is a key
  float lse_log2[kNumStages][kBlockM];
  float neg_delta[kNumStages][kBlockM];
};
static_assert(sizeof(SharedMemory) <= kMaxSharedBytes, "of a block");

// ---------------------------------------------------------------- copies

// Starts copying rows [row_start, row_start + kRows) of a matrix with num_rows rows into a tile. What lies past
// the matrix' end becomes zeros.
template <int kRows>
__device__ void copy_tile(Element (*tile)[kPaddedDim], const Element* matrix, int64_t row_stride,
                          int row_start, int num_rows) {
  constexpr int kChunks = kPaddedDim / 8;  // of a row
  constexpr int kStep = kNumThreads / kChunks;
  const int first_row = threadIdx.x / kChunks, col = threadIdx.x % kChunks * 8;
  const Element* source = matrix + (row_start + first_row) * row_stride + col;
  Element* target = &tile[first_row][swizzle<kPaddedDim>(first_row, col)];
  static_assert(kRows % kStep == 0 && kStep % 8 == 0, "a thread's rows have one swizzle");
#pragma unroll
  for (int row = 0; row < kRows; row += kStep) {
    const bool inside = row_start + first_row + row < num_rows && col < kHeadDim;
    cp_async_16(target + row * kPaddedDim, source + row * row_stride, inside);
  }
}

// Starts copying kBlockM numbers, of rows that exist: the scratch arrays are padded to whole tiles.
__device__ void copy_statistics(float* target, const float* source) {
  if (threadIdx.x < kBlockM / 4) {
    cp_async_16(target + 4 * threadIdx.x, source + 4 * threadIdx.x);
  }
}

// ---------------------------------------------------------------- the main kernel

// Outer K: a block owns kBlockN keys of one head and walks over the queries. The grid has the blocks of keys from
// first_n_block on, as many for each head.
__global__ void __launch_bounds__(kNumThreads, 1)
    backward_kernel(const BackwardParams params, const float* lse_log2, const float* neg_delta,
                    float* dq_accum, int first_n_block, int heads_at_once) {
  SharedMemory& smem = *dynamic_smem<SharedMemory>();
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  const int warp_key = 16 * warp;  // first key of this warp in the tile
  // Half of the warps add dQ first in an iteration, half last: so the exponentials of one half run beside the
  // products of the other.
  const bool dq_first = warp < kNumWarps / 2;
  const LaneOffset<kPaddedDim> lane_offset;
  const LaneOffset<kBlockM> lane_offset_ds;
  const float scale_log2 = params.softmax_scale * kLog2e;

  const Sizes sizes(params);
  const GridPlace place(static_cast<int>(sizes.heads), heads_at_once);
  const int batch = place.head / params.num_heads, head = place.head % params.num_heads;
  const Element* q = params.q + params.q_strides.offset(batch, head);  // [seqlen_q, kHeadDim]
  const Element* dout =
      params.dout + params.dout_strides.offset(batch, head);           // [seqlen_q, kHeadDim]
  const Element* k = params.k + params.k_strides.offset(batch, head);  // [seqlen_k, kHeadDim]
  const Element* v = params.v + params.v_strides.offset(batch, head);  // [seqlen_k, kHeadDim]
  const int64_t padded_row = place.head * sizes.padded_rows;
  const int64_t split = params.deterministic ? place.n_block : 0;
  const int n_start = (first_n_block + place.n_block) * kBlockN;
  const QueryTiles<kBlockM> m_blocks(params, n_start);
  float* dq = dq_accum + split * sizes.split_elements() + padded_row * kPaddedDim;

  const auto copy_queries = [&](int m_block, int stage) {
    const int m_start = m_block * kBlockM;
    copy_tile<kBlockM>(smem.sQ[stage], q, params.q_strides.row, m_start, params.seqlen_q);
    copy_tile<kBlockM>(smem.sdO[stage], dout, params.dout_strides.row, m_start, params.seqlen_q);
    copy_statistics(smem.lse_log2[stage], lse_log2 + padded_row + m_start);
    copy_statistics(smem.neg_delta[stage], neg_delta + padded_row + m_start);
  };
  // The numbers of two neighbouring queries that this lane's elements belong to.
  const auto statistics = [&](const float* tile, int col) {
    return *reinterpret_cast<const float2*>(tile + 8 * col + lane % 4 * 2);
  };
  // dQ_accum += dS K, of one tile
  const auto add_dq = [&](int m_block, int stage) {
    constexpr int kTilesAcross = kPaddedDim / kColsDq;
    const int row = warp / kTilesAcross * kRowsDq, col = warp % kTilesAcross * kColsDq;
    float acc_dq[kRowsDq / 16][kColsDq / 8][4] = {};
    const auto load_k = [&](uint32_t (&fragment)[4], int k, int j) {
      ldmatrix_trans(fragment, at(smem.sK, k, col + j, lane_offset.first));
    };
    add_product_at<kBlockN>(acc_dq, smem.sdS[stage], row, lane_offset_ds, load_k);
    add_to_dq<kPaddedDim>(dq, m_block * kBlockM + row, col, acc_dq);
  };

  copy_tile<kBlockN>(smem.sK, k, params.k_strides.row, n_start, params.seqlen_k);
  copy_tile<kBlockN>(smem.sV, v, params.v_strides.row, n_start, params.seqlen_k);
  copy_queries(m_blocks[0], 0);
  cp_async_commit();
  float acc_dk[1][kPaddedDim / 8][4] = {};
  float acc_dv[1][kPaddedDim / 8][4] = {};

  for (int i = 0; i < m_blocks.count; ++i) {
    const int stage = i % kNumStages, m_start = m_blocks[i] * kBlockM;
    cp_async_wait<0>();
    __syncthreads();  // tile i and dS of tile i - 1 are complete; the other stages are not read any more
    if (i + 1 < m_blocks.count) copy_queries(m_blocks[i + 1], 1 - stage);
    cp_async_commit();
    if (i > 0 && dq_first) add_dq(m_blocks[i - 1], 1 - stage);

    // 1. Sᵀ = K Qᵀ  [16, kBlockM], not scaled yet
    float acc_s[1][kBlockM / 8][4] = {};
    add_product_bt(acc_s, smem.sK + warp_key, smem.sQ[stage], lane_offset);
    // 3. dPᵀ - delta = V dOᵀ - delta, for the accumulator starts at -delta
    float acc_dp[1][kBlockM / 8][4];
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      const float2 x = statistics(smem.neg_delta[stage], j);
      acc_dp[0][j][0] = acc_dp[0][j][2] = x.x;
      acc_dp[0][j][1] = acc_dp[0][j][3] = x.y;
    }
    add_product_bt(acc_dp, smem.sV + warp_key, smem.sdO[stage], lane_offset);

    uint32_t p[kBlockM / 16][1][4], ds[kBlockM / 16][1][4];
    const auto make_p_and_ds = [&](auto is_masked) {
      const Mask mask(params, m_start + lane % 4 * 2, n_start + warp_key + lane / 4);
#pragma unroll
      for (int j = 0; j < kBlockM / 8; ++j) {
        const float2 lse = statistics(smem.lse_log2[stage], j);
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          float x[2], dx[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const bool hidden = decltype(is_masked)::value && mask.hides(8 * j + i, e / 2 * 8);
            // 2. P = exp(S - lse)
            const float s = fmaf(acc_s[0][j][e + i], scale_log2, i == 0 ? lse.x : lse.y);
            x[i] = hidden ? 0.0f : fast_exp2(s);
            // 4. dS = P ∘ (dP - delta). P = 0 alone is not enough for the mask: a hidden dP may be infinite or
            // NaN, and 0 · inf = NaN.
            dx[i] = hidden ? 0.0f : x[i] * acc_dp[0][j][e + i];
          }
          p[j / 2][0][j % 2 * 2 + e / 2] = pack<Element>(x[0], x[1]);
          ds[j / 2][0][j % 2 * 2 + e / 2] = pack<Element>(dx[0], dx[1]);
        }
        if (j % 2 == 1) {
          stmatrix(at(smem.sdS[stage], warp_key, 8 * (j - 1), lane_offset_ds.first), ds[j / 2][0]);
        }
      }
    };
    with_mask(needs_mask<kBlockN>(params, m_start, n_start), make_p_and_ds);
    // 5. dV += Pᵀ dO  [16, kPaddedDim]
    add_product_ra(acc_dv, p, smem.sdO[stage], lane_offset, [](int) {});
    // 6. dK += dSᵀ Q  [16, kPaddedDim]
    add_product_ra(acc_dk, ds, smem.sQ[stage], lane_offset, [](int) {});
    // 7. dQ_accum += dS K, of the tile before: by then the other warps' keys are there
    if (i > 0 && !dq_first) add_dq(m_blocks[i - 1], 1 - stage);
  }

  __syncthreads();  // dS of the last tile is complete
  add_dq(m_blocks[m_blocks.count - 1], (m_blocks.count - 1) % kNumStages);
  __syncthreads();  // sK is not read any more
  const int64_t head_offset = int64_t(place.head) * params.seqlen_k * kHeadDim;
  const int key = n_start + warp_key;
  store_rows(params.dk + head_offset, acc_dk, params.softmax_scale, key, params.seqlen_k,
             smem.sK + warp_key, lane_offset);
  store_rows(params.dv + head_offset, acc_dv, 1.0f, key, params.seqlen_k, smem.sV + warp_key,
             lane_offset);
}

}  // namespace

void describe_workspace(const BackwardParams& params, WorkspaceLayout& layout) {
  describe_scratch<Sizes>(params, layout);
}

cudaError_t launch_backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  if (!rows_are_aligned(params)) return cudaErrorInvalidValue;
  return launch_all<Sizes>(params, workspace, stream, [&](const MainLaunch& main) {
    return launch(backward_kernel, dim3(main.num_blocks), dim3(kNumThreads), sizeof(SharedMemory),
                  stream, params, main.lse_log2, main.neg_delta, main.dq_accum, main.first_n_block,
                  main.heads_at_once);
  });
}
