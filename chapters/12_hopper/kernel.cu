// 12_hopper: products of 128 threads at once that read shared memory themselves, and a thread that only loads.
//
//   delta = rowsum(O ∘ dO)
//   Sᵀ = softmax_scale · K Qᵀ   Pᵀ = exp(Sᵀ - lse)   dPᵀ = V dOᵀ   dSᵀ = Pᵀ ∘ (dPᵀ - delta)
//   dV += Pᵀ dO                 dK += softmax_scale · dSᵀ Q        dQ_accum[split] += dS K
//   dQ = softmax_scale · Σ dQ_accum[split]
//
// The change: wgmma. A warpgroup multiplies out of swizzled shared memory while its threads go on, TMA copies tiles
// there, and a thread of a third warpgroup only starts the copies. Two warpgroups, the consumers, own 64 keys each: P
// and dS stay in the registers that made them, only dS for dQ goes through shared memory. They issue products in
// turns, so that one multiplies while the other makes P or dS, and adds dQ to the global sum between exponentials:
//
//   consumer 0 | dP dV (i) | dS(i)     | dK(i) dQ(i-1) S(i+1) | P(i+1)             | dP dV (i+1) |
//   consumer 1 | P(i)      | dP dV (i) | dS(i)                | dK dQ (i) S(i+1)   | P(i+1)      | ...
//
// Grid and global scratch: as in 11. Block: a warpgroup that loads and two that compute.
// Shared memory: K, V; three stages of Q and dO, two of dS.
//
// The forward pass, at the end of the file, has the same roles. A consumer owns 64 queries, and the tiles of keys pass
// by: while it multiplies S of one tile and P V of the tile before, the others make P. Grid: a block for each SM, or for
// each tile of queries.
#include "common/cuda/alignment.h"
#include "common/cuda/attention.h"
#include "common/cuda/barrier.h"
#include "common/cuda/dq_accumulator.h"
#include "common/cuda/launch.h"
#include "common/cuda/mbarrier.h"
#include "common/cuda/reduce.h"
#include "common/cuda/schedule.h"
#include "common/cuda/tensor_core.h"
#include "common/cuda/tensor_map.h"
#include "common/cuda/wgmma.h"

namespace {

static_assert(sizeof(Element) == 2, "tensor cores multiply fp16 or bf16 here; for fp32 use 08");

constexpr int kPaddedDim = kHeadDim <= 64 ? 64 : 128;
constexpr int kBlockM = kPaddedDim == 64 ? 128 : 64;
constexpr int kBlockN = 128;
constexpr int kPanels = kPaddedDim / kPanelColumns;  // of a tile whose rows are queries or keys
constexpr int kStages = 3;                           // of Q and dO
constexpr int kStagesDs = 2;

constexpr int kNumConsumers = 2;
constexpr int kConsumerThreads = kNumConsumers * kWarpgroupThreads;
constexpr int kNumThreads = kWarpgroupThreads + kConsumerThreads;
constexpr int kConsumerKeys = kBlockN / kNumConsumers;
static_assert(kConsumerKeys == 64, "the rows of a wgmma");

// A consumer's share of dQ is 64 queries by 64 columns: half of the queries, or half of the columns.
constexpr bool kSplitsQueries = kPaddedDim == 64;

using Sizes = BackwardSizes<kBlockM, kBlockN, kPaddedDim>;

template <int kRows>
using Panel = Element[kRows][kPanelColumns];

struct SharedMemory {
  Panel<kBlockN> sK[kPanels];
  Panel<kBlockN> sV[kPanels];
  Panel<kBlockM> sQ[kStages][kPanels];
  Panel<kBlockM> sdO[kStages][kPanels];
  Panel<kBlockN> sdS[kStagesDs][kBlockM / kPanelColumns];  // transposed: a row is a key
  float lse_log2[kStages][kBlockM];
  float neg_delta[kStages][kBlockM];
  // Full: what the copies bring is there, the producer tells the consumers. Empty: every consumer warp has read
  // all of the stage.
  MBarrier k_full, v_full;
  MBarrier q_full[kStages];     // Q and lse_log2
  MBarrier dout_full[kStages];  // dO and neg_delta
  MBarrier empty[kStages];      // of all four
};
static_assert(sizeof(SharedMemory) <= 227 * 1024, "of a block");

// What all threads know of the block of keys they work on.
struct Block {
  SharedMemory& smem;
  const BackwardParams& params;
  const float *lse_log2, *neg_delta;  // [all padded rows]
  float* dq;                          // [all padded rows, kPaddedDim], in the order of fragments
  int batch, head;
  int first_row;  // of this head in lse_log2, neg_delta and dq
  int n_start;
  QueryTiles<kBlockM> m_blocks;

  __device__ int m_start(int i) const { return m_blocks[i] * kBlockM; }
};

// ---------------------------------------------------------------- the producer

struct TensorMaps {
  TensorMap q, k, v, dout;
};

// Starts copying a tile of rows, panel by panel.
template <int kRows>
__device__ void load_tile(Panel<kRows> (&tile)[kPanels], const TensorMap& map, MBarrier* full,
                          const Block& block, int row) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    tma_load(tile[panel], map, full, panel * kPanelColumns, row, block.head, block.batch);
  }
}

// One thread, ahead of the consumers by as many tiles as there are stages.
__device__ void produce(const Block& block, const TensorMaps& maps) {
  SharedMemory& smem = block.smem;
  constexpr int kStatisticsBytes = kBlockM * sizeof(float);
  constexpr int kTileBytes = sizeof(smem.sQ[0]) + kStatisticsBytes;
  const auto load_q = [&](int i) {
    const int stage = i % kStages;
    mbarrier_expect(&smem.q_full[stage], kTileBytes);
    load_tile(smem.sQ[stage], maps.q, &smem.q_full[stage], block, block.m_start(i));
    bulk_load(smem.lse_log2[stage], block.lse_log2 + (block.first_row + block.m_start(i)),
              kStatisticsBytes, &smem.q_full[stage]);
  };
  const auto load_dout = [&](int i) {
    const int stage = i % kStages;
    mbarrier_expect(&smem.dout_full[stage], kTileBytes);
    load_tile(smem.sdO[stage], maps.dout, &smem.dout_full[stage], block, block.m_start(i));
    bulk_load(smem.neg_delta[stage], block.neg_delta + (block.first_row + block.m_start(i)),
              kStatisticsBytes, &smem.dout_full[stage]);
  };
  mbarrier_expect(&smem.k_full, sizeof(smem.sK));
  load_tile(smem.sK, maps.k, &smem.k_full, block, block.n_start);
  load_q(0);
  mbarrier_expect(&smem.v_full, sizeof(smem.sV));
  load_tile(smem.sV, maps.v, &smem.v_full, block, block.n_start);
  load_dout(0);
#pragma unroll 1
  for (int i = 1; i < block.m_blocks.count; ++i) {
    // Tile i - kStages has been read; of the first tiles in a stage there is none, and the wait returns at once.
    mbarrier_wait(&smem.empty[i % kStages], i / kStages % 2 ^ 1);
    load_q(i);
    load_dout(i);
  }
}

// ---------------------------------------------------------------- products of a consumer

// acc = A Bᵀ, or acc += A Bᵀ if `adds`: rows of kPaddedDim elements, in panels of kRowsA and kRowsB rows
template <int kRowsA, int kRowsB, int kRegisters>
__device__ __forceinline__ void issue_product_bt(float (&acc)[kRegisters], SharedMatrix a,
                                                 SharedMatrix b, bool adds) {
#pragma unroll
  for (int k = 0; k < kPaddedDim / 16; ++k) {
    wgmma<Element, Major::k, Major::k>(acc, a, k / 4 * int(sizeof(Panel<kRowsA>)) + k % 4 * 32, b,
                                       k / 4 * int(sizeof(Panel<kRowsB>)) + k % 4 * 32,
                                       adds || k > 0);
  }
}

// acc [64, kPaddedDim] += A B, A [64, kBlockM] in registers, the rows of B are those of a tile of queries
__device__ __forceinline__ void issue_product_ra(float (&acc)[kPaddedDim / 2],
                                                 const uint32_t (&a)[kBlockM / 16][4],
                                                 SharedMatrix b) {
#pragma unroll
  for (int k = 0; k < kBlockM / 16; ++k) wgmma<Element, Major::m>(acc, a[k], b, k * 2048);
}

// acc [64, 64] = Aᵀ B: one panel of each, of kBlockN rows
__device__ __forceinline__ void issue_product_at(float (&acc)[32], SharedMatrix a, SharedMatrix b) {
#pragma unroll
  for (int k = 0; k < kBlockN / 16; ++k) {
    wgmma<Element, Major::m, Major::m>(acc, a, k * 2048, b, k * 2048, k > 0);
  }
}

// ---------------------------------------------------------------- a consumer

// A consumer's place among the threads: it owns keys [n_start + 64 index, n_start + 64 index + 64) of the block.
struct Consumer {
  int index;       // 0 or 1
  int warp, lane;  // warp of the warpgroup

  // Waits until the other consumer has issued its products.
  __device__ void wait_for_turn() const {
    if (index == 0) {
      barrier_sync(1, kConsumerThreads);
    } else {
      barrier_sync(2, kConsumerThreads);
    }
  }
  __device__ void pass_turn() const {
    if (index == 0) {
      barrier_arrive(2, kConsumerThreads);
    } else {
      barrier_arrive(1, kConsumerThreads);
    }
  }
  // The lanes of this warp have read a stage.
  __device__ void release(MBarrier* empty) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty);
  }

  // Of this lane's first element in a tile whose rows are keys and columns queries.
  __device__ int first_key() const { return kConsumerKeys * index + 16 * warp + lane / 4; }
  __device__ int first_query() const { return lane % 4 * 2; }

  // Where this lane points stmatrix within 16 rows and columns of panels, the columns being [col, col + 16).
  template <int kRows>
  __device__ Element* at(Panel<kRows>* panels, int col) const {
    const int row = lane % 16, chunk = col % kPanelColumns / 8 + lane / 16;
    return &panels[col / kPanelColumns][kConsumerKeys * index + 16 * warp + row]
                  [(chunk ^ row % 8) * 8];
  }
};

// Sets to zero what is hidden of a tile whose rows are keys and columns queries.
__device__ __forceinline__ void hide(float (&x)[kBlockM / 2], const Block& block,
                                     const Consumer& self, int i) {
  const Mask mask(block.params, block.m_start(i) + self.first_query(),
                  block.n_start + self.first_key());
#pragma unroll
  for (int n = 0; n < kBlockM / 2; ++n) {
    if (mask.hides(n / 4 * 8 + n % 2, n % 4 / 2 * 8)) x[n] = 0.0f;
  }
}

// Writes acc, this warp's 16 rows of a tile that begins at row_start, to a dense matrix with num_rows rows: the upper 8
// times one scale, the lower 8 times another. Through the warp's rows of `panels`, for rows of memory are longer than
// those of fragments.
template <int kRows>
__device__ __forceinline__ void store_rows(Element* matrix, int row_start, int num_rows,
                                           Panel<kRows>* panels, const Consumer& self,
                                           const float (&acc)[kPaddedDim / 2], float upper,
                                           float lower) {
#pragma unroll
  for (int k = 0; k < kPaddedDim / 16; ++k) {
    uint32_t fragment[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float scale = n % 2 == 0 ? upper : lower;
      fragment[n] = pack<Element>(scale * acc[8 * k + 2 * n], scale * acc[8 * k + 2 * n + 1]);
    }
    stmatrix(self.at(panels, 16 * k), fragment);
  }
  __syncwarp();  // the rows are complete
#pragma unroll
  for (int n = self.lane; n < 16 * (kPaddedDim / 8); n += 32) {
    const int col = n % (kPaddedDim / 8) * 8;
    const int row = 64 * self.index + 16 * self.warp + n / (kPaddedDim / 8);
    if (row_start + row >= num_rows || col >= kHeadDim) continue;
    const auto* chunk = &panels[col / kPanelColumns][row][(col % kPanelColumns / 8 ^ row % 8) * 8];
    const uint4 eight = *reinterpret_cast<const uint4*>(chunk);
    *reinterpret_cast<uint4*>(matrix + int64_t(row_start + row) * kHeadDim + col) = eight;
  }
  __syncwarp();  // the rows may be written again
}

// Steps 1 to 7 for a consumer's keys. Named barriers 1 and 2 are the turns of consumer 0 and 1: who calls
// wait_for_turn() goes on when the other has called pass_turn(), and sees all that it did before.
//
// dS needs no other barrier. A consumer writes its half of dS(i) between its two turns of iteration i.
//   Written before it is read: consumer 1 reads consumer 0's half in its second turn of iteration i, which consumer 0
//   passes in its own second; consumer 0 reads consumer 1's half in its second turn of i + 1, which consumer 1 passes
//   in its first of i + 1.
//   Read before dS(i + 2) takes its place: consumer 1 has waited for its dQ(i) before its first turn of i + 1, and
//   consumer 0 writes after its first turn of i + 2. Consumer 0 has waited for its dQ(i) before its first turn of
//   i + 2, which it passes to consumer 1, which writes after that.
__device__ void consume(const Block& block, const Consumer& self, Element* dk, Element* dv) {
  SharedMemory& smem = block.smem;
  const int count = block.m_blocks.count;
  const float scale_log2 = block.params.softmax_scale * kLog2e;

  const int row = kConsumerKeys * self.index;
  const SharedMatrix k = shared_matrix(smem.sK[0][row], 0), v = shared_matrix(smem.sV[0][row], 0);
  const SharedMatrix q = shared_matrix(smem.sQ[0], sizeof(Panel<kBlockM>));
  const SharedMatrix dout = shared_matrix(smem.sdO[0], sizeof(Panel<kBlockM>));
  const SharedMatrix ds_of_dq = shared_matrix(smem.sdS[0][kSplitsQueries ? self.index : 0], 0);
  const SharedMatrix k_of_dq = shared_matrix(smem.sK[kSplitsQueries ? 0 : self.index], 0);
  // Of this consumer's share of dQ, this lane's first fragment in the head's first tile.
  const int row_dq = (kSplitsQueries ? 64 * self.index : 0) + 16 * self.warp;
  const int col_dq = kSplitsQueries ? 0 : 64 * self.index;
  float* dq =
      block.dq + int64_t(block.first_row + row_dq) * kPaddedDim + (col_dq / 8 * 32 + self.lane) * 4;

  float acc_dk[kPaddedDim / 2] = {}, acc_dv[kPaddedDim / 2] = {};
  float acc_s[kBlockM / 2], acc_dp[kBlockM / 2], acc_dq[32];
  uint32_t p[kBlockM / 16][4], ds[kBlockM / 16][4];  // rounded: the A of dV and dK

  // 1. Sᵀ = K Qᵀ  [64, kBlockM], not scaled yet
  const auto issue_s = [&](int stage) {
    issue_product_bt<kBlockN, kBlockM>(acc_s, k, q + stage * int(sizeof(smem.sQ[0])), false);
  };
  // 7. dQ_accum += dS K  [64, 64], the share of this consumer. Before the first tile there is no dS: with any other
  // numbers in its place the product is one like all others, only that nothing is added.
  const auto issue_dq = [&](int i) {
    const SharedMatrix ds = ds_of_dq + i % kStagesDs * int(sizeof(smem.sdS[0]));
    issue_product_at(acc_dq, i < 0 ? k_of_dq : ds, k_of_dq);
  };
  const auto add_dq = [&](int i, int j) {
    const float fragment[4] = {acc_dq[4 * j], acc_dq[4 * j + 1], acc_dq[4 * j + 2],
                               acc_dq[4 * j + 3]};
    reduce_add_if(i >= 0, dq + int64_t(block.m_start(i)) * kPaddedDim + 128 * j, fragment);
  };
  const auto add_all_of_dq = [&](int i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) add_dq(i, j);
  };
  // The tile whose dQ a consumer has computed by the end of iteration i; below zero there is none.
  const auto tile_of_dq = [&](int i) { return i - 1 + self.index; };

  if (self.index == 1) self.pass_turn();  // consumer 0 has the first
  mbarrier_wait(&smem.k_full, 0);
  mbarrier_wait(&smem.q_full[0], 0);
  self.wait_for_turn();
  wgmma_fence(acc_s);
  issue_s(0);
  wgmma_commit();
  self.pass_turn();
  mbarrier_wait(&smem.v_full, 0);
  wgmma_wait<0>(acc_s);

  const auto iterate = [&](int i, auto is_last) {
    constexpr bool kIsLast = decltype(is_last)::value;
    const int stage = i % kStages, next = (i + 1) % kStages;
    const bool is_masked =
        needs_mask<kConsumerKeys>(block.params, block.m_start(i), block.n_start + row);
    // 2. P = exp(S - lse), in place; between the exponentials, dQ of the iteration before goes out. All of it at once
    // would be more than memory takes without stopping the warp.
    {
      const int i_dq = i == 0 ? -1 : tile_of_dq(i - 1);
      const float* lse = smem.lse_log2[stage] + self.first_query();
      float2 ahead = *reinterpret_cast<const float2*>(lse);
#pragma unroll
      for (int j = 0; j < kBlockM / 8; ++j) {
        const float2 x = ahead;
        if (j + 1 < kBlockM / 8) ahead = *reinterpret_cast<const float2*>(lse + 8 * (j + 1));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          acc_s[4 * j + e] = fast_exp2(fmaf(acc_s[4 * j + e], scale_log2, e % 2 == 0 ? x.x : x.y));
        }
        constexpr int kEvery = kBlockM / 64;
        if (j % kEvery == 0) add_dq(i_dq, j / kEvery);
      }
      // After the scale, which may be zero or negative, for then no score would be low enough.
      if (is_masked) hide(acc_s, block, self, i);
#pragma unroll
      for (int n = 0; n < kBlockM / 4; ++n) {
        p[n / 4][n % 4] = pack<Element>(acc_s[2 * n], acc_s[2 * n + 1]);
      }
    }
    mbarrier_wait(&smem.dout_full[stage], i / kStages % 2);
    {
      const float* delta = smem.neg_delta[stage] + self.first_query();
#pragma unroll
      for (int j = 0; j < kBlockM / 8; ++j) {
        const float2 x = *reinterpret_cast<const float2*>(delta + 8 * j);
        acc_dp[4 * j] = acc_dp[4 * j + 2] = x.x;
        acc_dp[4 * j + 1] = acc_dp[4 * j + 3] = x.y;
      }
    }
    self.wait_for_turn();  // the first of this iteration
    wgmma_fence(acc_dp, acc_dv, p);
    // 3. dPᵀ - delta = V dOᵀ - delta  [64, kBlockM], for the accumulator starts at -delta
    issue_product_bt<kBlockN, kBlockM>(acc_dp, v, dout + stage * int(sizeof(smem.sdO[0])), true);
    wgmma_commit();
    // 5. dV += Pᵀ dO  [64, kPaddedDim]
    issue_product_ra(acc_dv, p, dout + stage * int(sizeof(smem.sdO[0])));
    wgmma_commit();
    self.pass_turn();
    wgmma_wait<1>(acc_dp);
    // 4. dS = P ∘ (dP - delta), of P in fp32. P = 0 alone would not hide a dP that is infinite: 0 · inf = NaN.
    if (is_masked) hide(acc_dp, block, self, i);
#pragma unroll
    for (int n = 0; n < kBlockM / 4; ++n) {
      ds[n / 4][n % 4] =
          pack<Element>(acc_s[2 * n] * acc_dp[2 * n], acc_s[2 * n + 1] * acc_dp[2 * n + 1]);
    }
    wgmma_wait<0>(acc_dv, p);  // for the registers of P, which the compiler needs from here on
#pragma unroll
    for (int j = 0; j < kBlockM / 16; ++j) {
      stmatrix(self.at(smem.sdS[i % kStagesDs], 16 * j), ds[j]);
    }
    fence_async_proxy();  // both consumers' dQ reads this dS, after the turn that follows
    if (!kIsLast) mbarrier_wait(&smem.q_full[next], (i + 1) / kStages % 2);
    self.wait_for_turn();  // the second
    wgmma_fence(acc_dk, ds);
    // 6. dK += dSᵀ Q  [64, kPaddedDim]
    issue_product_ra(acc_dk, ds, q + stage * int(sizeof(smem.sQ[0])));
    wgmma_commit();
    issue_dq(tile_of_dq(i));
    if (!kIsLast) issue_s(next);
    wgmma_commit();
    self.pass_turn();
    wgmma_wait<1>(acc_dk, ds);
    self.release(&smem.empty[stage]);
    // Nothing is under way at the end: the compiler would wait after every product of the loop.
    wgmma_wait<0>(acc_s, acc_dq);
  };
#pragma unroll 1
  for (int i = 0; i + 1 < count; ++i) iterate(i, std::false_type{});
  iterate(count - 1, std::true_type{});
  add_all_of_dq(tile_of_dq(count - 1));
  if (self.index == 0) {
    self.wait_for_turn();  // consumer 1's half of the last dS is there
    wgmma_fence();
    issue_dq(count - 1);
    wgmma_commit();
    wgmma_wait<0>(acc_dq);
    add_all_of_dq(count - 1);
  }
  // Through this consumer's rows of V, which nobody else has read, and it itself before its last turn.
  const float scale = block.params.softmax_scale;
  store_rows(dv, block.n_start, block.params.seqlen_k, smem.sV, self, acc_dv, 1.0f, 1.0f);
  store_rows(dk, block.n_start, block.params.seqlen_k, smem.sV, self, acc_dk, scale, scale);
}

// Outer K: a block owns kBlockN keys of one head and walks over the queries. The grid has the blocks of keys from
// first_n_block on, as many for each head.
__global__ void __launch_bounds__(kNumThreads, 1)
    backward_kernel(const BackwardParams params, const __grid_constant__ TensorMaps maps,
                    const float* lse_log2, const float* neg_delta, float* dq_accum,
                    int first_n_block, int heads_at_once) {
  SharedMemory& smem = *dynamic_smem<SharedMemory>();
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.k_full, 1);
    mbarrier_init(&smem.v_full, 1);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&smem.q_full[stage], 1);
      mbarrier_init(&smem.dout_full[stage], 1);
      mbarrier_init(&smem.empty[stage], kConsumerThreads / 32);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are there

  const Sizes sizes(params);
  const GridPlace place(static_cast<int>(sizes.heads), heads_at_once);
  const int n_start = (first_n_block + place.n_block) * kBlockN;
  const int64_t split = params.deterministic ? place.n_block : 0;
  const Block block{smem,
                    params,
                    lse_log2,
                    neg_delta,
                    dq_accum + split * sizes.split_elements(),
                    place.head / params.num_heads,
                    place.head % params.num_heads,
                    static_cast<int>(place.head * sizes.padded_rows),
                    n_start,
                    QueryTiles<kBlockM>(params, n_start)};
  if (warpgroup == 0) {
    give_up_registers<24>();
    if (threadIdx.x == 0) produce(block, maps);
  } else {
    take_registers<240>();
    const Consumer self{warpgroup - 1, static_cast<int>(threadIdx.x % kWarpgroupThreads / 32),
                        static_cast<int>(threadIdx.x % 32)};
    const int64_t first_row = int64_t(place.head) * params.seqlen_k;  // of this head in dk and dv
    consume(block, self, params.dk + first_row * kHeadDim, params.dv + first_row * kHeadDim);
  }
}

// ---------------------------------------------------------------- the forward pass

//   1. S = Q Kᵀ    2. P = exp(softmax_scale · S - m), m and l follow the tiles of keys    3. O += P V
//
//   consumer 0 | S(j+1) P V(j) | P(j+1)          | S(j+2) P V(j+1) | ...
//   consumer 1 | P(j)          | S(j+1) P V(j)   | P(j+1)          | ...
//
// A block may take one tile of queries after the other, and loads the next while it finishes one. As in backward a
// thread loads, and consumers multiply; a consumer owns 64 queries of the tile, from S to O.
constexpr int kForwardConsumers = kPaddedDim == 64 ? 3 : 2;
constexpr int kForwardM = 64 * kForwardConsumers;  // queries
constexpr int kForwardN = 128;                     // keys
constexpr int kForwardStages = 2;                  // of Q, of K and of V
constexpr int kForwardThreads = kWarpgroupThreads * (1 + kForwardConsumers);

struct ForwardSharedMemory {
  Panel<kForwardM> sQ[kForwardStages][kPanels];
  Panel<kForwardM> sO[kPanels];
  Panel<kForwardN> sK[kForwardStages][kPanels];
  Panel<kForwardN> sV[kForwardStages][kPanels];
  // As in backward. Empty: every consumer warp has read it.
  MBarrier q_full[kForwardStages], q_empty[kForwardStages];
  MBarrier k_full[kForwardStages], k_empty[kForwardStages];
  MBarrier v_full[kForwardStages], v_empty[kForwardStages];
};
static_assert(sizeof(ForwardSharedMemory) <= 227 * 1024, "of a block");

struct ForwardTensorMaps {
  TensorMap q, k, v;
};

// One tile of queries. Its queries see keys of the first `count` tiles of keys.
struct ForwardWork {
  int batch, head, m_start, count;
};

// Which tiles of queries a block works on, and in which order. With a causal mask the last queries see the most keys:
// of heads_at_once heads the long tiles come first. Blocks are dealt tiles forwards and backwards by turns, for else
// the first block would always get the longest.
struct ForwardWorkList {
  const ForwardParams& params;
  int heads_at_once, num_m_blocks, size;

  __device__ ForwardWorkList(const ForwardParams& params, int heads_at_once)
      : params(params),
        heads_at_once(heads_at_once),
        num_m_blocks((params.seqlen_q + kForwardM - 1) / kForwardM),
        size(params.batch * params.num_heads * num_m_blocks) {}

  // Of this block's `round`-th tile the place in the order, at or behind `size` if there is none.
  __device__ int place(int round) const {
    const int first = round * gridDim.x;
    return first + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }
  __device__ ForwardWork operator[](int place) const {
    const int first_head = place / (heads_at_once * num_m_blocks) * heads_at_once;
    const int heads = min(heads_at_once, params.batch * params.num_heads - first_head);
    const int i = place - first_head * num_m_blocks;
    const int head = first_head + i % heads;
    const int m_start = (params.is_causal ? num_m_blocks - 1 - i / heads : i / heads) * kForwardM;
    const int last_row = min(m_start + kForwardM, params.seqlen_q) - 1;
    const int count = (params.num_visible_keys(last_row) + kForwardN - 1) / kForwardN;
    return {head / params.num_heads, head % params.num_heads, m_start, count};
  }
};

// Where the i-th tile of a kind that a block loads lies, and the parity of the phase in which it is full.
struct ForwardStage {
  int stage, parity;

  __device__ explicit ForwardStage(int i)
      : stage(i % kForwardStages), parity(i / kForwardStages % 2) {}
};

// One thread. K is loaded one tile ahead of V, as the consumers need them.
__device__ void forward_produce(ForwardSharedMemory& smem, const ForwardTensorMaps& maps,
                                const ForwardWorkList& works) {
  int tiles = 0, num_q = 0;  // loaded so far
  for (int round = 0; works.place(round) < works.size; ++round) {
    const ForwardWork work = works[works.place(round)];
    if (work.count == 0) continue;
    const auto load = [&](auto& tile, const TensorMap& map, MBarrier* full, int row) {
      mbarrier_expect(full, sizeof(tile));
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        tma_load(tile[panel], map, full, panel * kPanelColumns, row, work.head, work.batch);
      }
    };
    const auto load_k = [&](int i) {
      const ForwardStage at(tiles + i);
      mbarrier_wait(&smem.k_empty[at.stage], at.parity ^ 1);
      load(smem.sK[at.stage], maps.k, &smem.k_full[at.stage], i * kForwardN);
    };
    const auto load_v = [&](int i) {
      const ForwardStage at(tiles + i);
      mbarrier_wait(&smem.v_empty[at.stage], at.parity ^ 1);
      load(smem.sV[at.stage], maps.v, &smem.v_full[at.stage], i * kForwardN);
    };
    const ForwardStage at(num_q);
    mbarrier_wait(&smem.q_empty[at.stage], at.parity ^ 1);
    load(smem.sQ[at.stage], maps.q, &smem.q_full[at.stage], work.m_start);
    load_k(0);
#pragma unroll 1
    for (int i = 0; i < work.count; ++i) {
      if (i + 1 < work.count) load_k(i + 1);
      load_v(i);
    }
    tiles += work.count;
    ++num_q;
  }
}

// A consumer's place among the threads: it owns queries [m_start + 64 index, m_start + 64 index + 64). The consumers
// take turns, as in backward, but in a circle of two or three.
struct ForwardConsumer : Consumer {
  // Waits until the consumer before this one has issued its products.
  __device__ void wait_for_turn() const { barrier_sync(1 + index, 2 * kWarpgroupThreads); }
  __device__ void pass_turn() const {
    barrier_arrive(1 + (index + 1) % kForwardConsumers, 2 * kWarpgroupThreads);
  }
  // Of this lane's first element in the tile of queries, and in a tile of keys; the other row is 8 further on.
  __device__ int first_row() const { return 64 * index + 16 * warp + lane / 4; }
  __device__ int first_col() const { return lane % 4 * 2; }
};

// Over the four lanes that hold a row.
__device__ __forceinline__ float row_max_of(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float row_sum_of(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// The softmax of a lane's two rows over the keys seen so far.
struct OnlineSoftmax {
  float scale_log2, sign;  // softmax_scale · log2 e; see scores()
  float row_max[2];        // m · log2 e
  float row_sum[2];        // the lane's share of l

  __device__ explicit OnlineSoftmax(float softmax_scale)
      : scale_log2(softmax_scale == 0.0f ? 1.0f : fabsf(softmax_scale) * kLog2e),
        sign(softmax_scale > 0.0f    ? 1.0f
             : softmax_scale == 0.0f ? 0.0f
                                     : -1.0f) {
    reset();
  }
  __device__ void reset() {
    row_max[0] = row_max[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.0f;
  }

  // Q Kᵀ times the sign of the scale, for only a positive scale can wait until after the maximum.
  __device__ __forceinline__ void apply_sign(float (&s)[kForwardN / 2]) const {
    if (sign == 1.0f) return;
#pragma unroll
    for (int n = 0; n < kForwardN / 2; ++n) s[n] *= sign;
  }

  // m_new = max(m, rowmax S)   P = exp(S - m_new), in place of S   l = exp(m - m_new) · l + rowsum P
  // Returns exp(m - m_new) of both rows.
  __device__ __forceinline__ float2 update(float (&s)[kForwardN / 2]) {
    float largest[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};  // even and odd columns apart
#pragma unroll
    for (int n = 0; n < kForwardN / 2; ++n) largest[n % 4] = fmaxf(largest[n % 4], s[n]);
    float shift[2], rescale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float tile_max = row_max_of(fmaxf(largest[2 * half], largest[2 * half + 1]));
      const float new_max = fmaxf(row_max[half], tile_max * scale_log2);
      // For a row that has seen no key yet -inf - (-inf) would be NaN.
      shift[half] = new_max == -INFINITY ? 0.0f : new_max;
      rescale[half] = fast_exp2(row_max[half] - shift[half]);
      row_max[half] = new_max;
    }
    float sum[4] = {};
#pragma unroll
    for (int n = 0; n < kForwardN / 2; ++n) {
      s[n] = fast_exp2(fmaf(s[n], scale_log2, -shift[n % 4 / 2]));
      sum[n % 4] += s[n];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_sum[half] = rescale[half] * row_sum[half] + (sum[2 * half] + sum[2 * half + 1]);
    }
    return make_float2(rescale[0], rescale[1]);
  }
};

// Sets to -inf the scores of hidden keys. first_row, first_key: of this lane's first element.
__device__ __forceinline__ void hide(float (&s)[kForwardN / 2], const ForwardParams& params,
                                     int first_row, int first_key) {
  const int visible[2] = {params.num_visible_keys(first_row) - first_key,
                          params.num_visible_keys(first_row + 8) - first_key};
#pragma unroll
  for (int n = 0; n < kForwardN / 2; ++n) {
    if (n / 4 * 8 + n % 2 >= visible[n % 4 / 2]) s[n] = -INFINITY;
  }
}

// Writes O, and what is known of its rows, through the warp's rows of sO.
__device__ __forceinline__ void store_forward(ForwardSharedMemory& smem,
                                              const ForwardParams& params, const ForwardWork& work,
                                              const ForwardConsumer& self,
                                              const OnlineSoftmax& softmax,
                                              const float (&acc_o)[kPaddedDim / 2]) {
  constexpr float kLn2 = 0.693147181f;
  const int64_t first_row =  // of this head in out and lse
      (int64_t(work.batch) * params.num_heads + work.head) * params.seqlen_q;
  float scale[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float row_max = softmax.row_max[half], row_sum = row_sum_of(softmax.row_sum[half]);
    // A row without a visible key has l = 0: O = 0 and lse = -inf.
    scale[half] = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
    const int row = work.m_start + self.first_row() + 8 * half;
    if (self.lane % 4 != 0 || row >= params.seqlen_q) continue;
    params.lse[first_row + row] =
        row_sum == 0.0f ? -INFINITY
                        : kLn2 * ((row_max == -INFINITY ? 0.0f : row_max) + log2f(row_sum));
    if (params.row_max != nullptr) params.row_max[first_row + row] = kLn2 * row_max;
    if (params.row_sum != nullptr) params.row_sum[first_row + row] = row_sum;
  }
  store_rows(params.out + first_row * kHeadDim, work.m_start, params.seqlen_q, smem.sO, self, acc_o,
             scale[0], scale[1]);
}

// Steps 1 to 3 for a consumer's queries. Named barriers 1 to 3 are the turns of consumers 0 to 2. They protect
// nothing: they put the products of one consumer beside the exponentials of the others.
__device__ void forward_consume(ForwardSharedMemory& smem, const ForwardParams& params,
                                const ForwardWorkList& works, const ForwardConsumer& self) {
  const SharedMatrix q = shared_matrix(smem.sQ[0][0][64 * self.index], 0);
  const SharedMatrix k = shared_matrix(smem.sK[0], 0);
  const SharedMatrix v = shared_matrix(smem.sV[0], sizeof(Panel<kForwardN>));
  OnlineSoftmax softmax(params.softmax_scale);
  float acc_o[kPaddedDim / 2], acc_s[kForwardN / 2];
  uint32_t p[kForwardN / 16][4];  // rounded: the A of O

  // 1. S = Q Kᵀ  [64, kForwardN], not scaled yet
  const auto issue_s = [&](int stage_q, int stage) {
    issue_product_bt<kForwardM, kForwardN>(acc_s, q + stage_q * int(sizeof(smem.sQ[0])),
                                           k + stage * int(sizeof(smem.sK[0])), false);
  };
  // 3. O += P V  [64, kPaddedDim]
  const auto issue_o = [&](int stage) {
#pragma unroll
    for (int i = 0; i < kForwardN / 16; ++i) {
      wgmma<Element, Major::m>(acc_o, p[i], v + stage * int(sizeof(smem.sV[0])), i * 2048);
    }
  };
  const auto pack_p = [&] {
#pragma unroll
    for (int n = 0; n < kForwardN / 4; ++n) {
      p[n / 4][n % 4] = pack<Element>(acc_s[2 * n], acc_s[2 * n + 1]);
    }
  };

  if (self.index == kForwardConsumers - 1) self.pass_turn();  // consumer 0 has the first
  int tiles = 0, num_q = 0;                                   // as in forward_produce()
#pragma unroll 1
  for (int round = 0; works.place(round) < works.size; ++round) {
    const ForwardWork work = works[works.place(round)];
    // Keys that all queries of this consumer see.
    const int num_seen = params.num_visible_keys(work.m_start + 64 * self.index);
    // 2. P = exp(S - m), in place
    const auto make_p = [&](int i) {
      softmax.apply_sign(acc_s);
      if ((i + 1) * kForwardN > num_seen) {
        hide(acc_s, params, work.m_start + self.first_row(), i * kForwardN + self.first_col());
      }
      return softmax.update(acc_s);
    };
    softmax.reset();
#pragma unroll
    for (int n = 0; n < kPaddedDim / 2; ++n) acc_o[n] = 0.0f;
    if (work.count > 0) {
      const ForwardStage at_q(num_q), first(tiles), last(tiles + work.count - 1);
      // S of tile i is there.
      const auto release_s = [&](int i, ForwardStage at) {
        self.release(&smem.k_empty[at.stage]);
        if (i + 1 == work.count) self.release(&smem.q_empty[at_q.stage]);
      };
      mbarrier_wait(&smem.q_full[at_q.stage], at_q.parity);
      mbarrier_wait(&smem.k_full[first.stage], first.parity);
      wgmma_fence(acc_s);
      issue_s(at_q.stage, first.stage);
      wgmma_commit();
      wgmma_wait<0>(acc_s);
      release_s(0, first);
      make_p(0);
      pack_p();
      mbarrier_wait(&smem.v_full[first.stage], first.parity);
      // S of a tile and O of the one before are multiplied together, P is made of S while O is under way.
#pragma unroll 1
      for (int i = 1; i < work.count; ++i) {
        const ForwardStage at(tiles + i), before(tiles + i - 1);
        mbarrier_wait(&smem.k_full[at.stage], at.parity);
        self.wait_for_turn();
        wgmma_fence(acc_s, acc_o, p);
        issue_s(at_q.stage, at.stage);
        wgmma_commit();
        issue_o(before.stage);
        wgmma_commit();
        self.pass_turn();
        wgmma_wait<1>(acc_s);
        release_s(i, at);
        const float2 rescale = make_p(i);
        // For the next product. Here, because the compiler moves the next wait to before the exponentials if there is
        // no branch between.
        mbarrier_wait(&smem.v_full[at.stage], at.parity);
        wgmma_wait<0>(acc_o, p);
        self.release(&smem.v_empty[before.stage]);
#pragma unroll
        for (int n = 0; n < kPaddedDim / 2; ++n) acc_o[n] *= n % 4 < 2 ? rescale.x : rescale.y;
        pack_p();
      }
      wgmma_fence(acc_o, p);
      issue_o(last.stage);
      wgmma_commit();
      wgmma_wait<0>(acc_o, p);
      self.release(&smem.v_empty[last.stage]);
      tiles += work.count;
      ++num_q;
    }
    store_forward(smem, params, work, self, softmax, acc_o);
  }
  if (self.index == 0) self.wait_for_turn();  // no thread arrives at a barrier that nobody waits at
}

__global__ void __launch_bounds__(kForwardThreads, 1)
    forward_kernel(const ForwardParams params, const __grid_constant__ ForwardTensorMaps maps,
                   int heads_at_once) {
  ForwardSharedMemory& smem = *dynamic_smem<ForwardSharedMemory>();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  const ForwardWorkList works(params, heads_at_once);
  const auto wait_for_barriers = [] {
    // The mbarriers are there: for the warp that loads, and the consumers.
    barrier_sync(1 + kForwardConsumers, 32 + kForwardConsumers * kWarpgroupThreads);
  };
  if (warpgroup == 0) {
    give_up_registers<kForwardConsumers == 3 ? 32 : 24>();
    if (threadIdx.x >= 32) return;
    if (threadIdx.x == 0) {
      constexpr int kConsumerWarps = 4 * kForwardConsumers;
      for (int i = 0; i < kForwardStages; ++i) {
        mbarrier_init(&smem.q_full[i], 1);
        mbarrier_init(&smem.k_full[i], 1);
        mbarrier_init(&smem.v_full[i], 1);
        mbarrier_init(&smem.q_empty[i], kConsumerWarps);
        mbarrier_init(&smem.k_empty[i], kConsumerWarps);
        mbarrier_init(&smem.v_empty[i], kConsumerWarps);
      }
      mbarrier_init_fence();
    }
    wait_for_barriers();
    if (threadIdx.x == 0) forward_produce(smem, maps, works);
  } else {
    take_registers<kForwardConsumers == 3 ? 160 : 240>();
    wait_for_barriers();
    const ForwardConsumer self{{warpgroup - 1,
                                static_cast<int>(threadIdx.x % kWarpgroupThreads / 32),
                                static_cast<int>(threadIdx.x % 32)}};
    forward_consume(smem, params, works, self);
  }
}

// Makes the maps of a launch's tensors. After an error it makes no more.
struct TensorMapMaker {
  const AttentionSizes& sizes;
  cudaError_t error = cudaSuccess;

  TensorMap operator()(const char* name, const Element* data, const TensorStrides& strides,
                       int rows, int tile_rows) {
    TensorMap map{};
    if (error != cudaSuccess) return map;
    error = make_tensor_map<Element>(&map, name,
                                     {data, kHeadDim, rows, sizes.num_heads, sizes.batch,
                                      strides.row, strides.head, strides.batch},
                                     tile_rows);
    return map;
  }
};

}  // namespace

void describe_workspace(const BackwardParams& params, WorkspaceLayout& layout) {
  describe_scratch<Sizes>(params, layout);
}

cudaError_t launch_backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  if (!rows_are_aligned(params)) return cudaErrorInvalidValue;
  TensorMapMaker map{params};
  const TensorMaps maps{map("q", params.q, params.q_strides, params.seqlen_q, kBlockM),
                        map("k", params.k, params.k_strides, params.seqlen_k, kBlockN),
                        map("v", params.v, params.v_strides, params.seqlen_k, kBlockN),
                        map("dout", params.dout, params.dout_strides, params.seqlen_q, kBlockM)};
  if (map.error != cudaSuccess) return map.error;
  return launch_all<Sizes>(params, workspace, stream, [&](const MainLaunch& main) {
    return launch(backward_kernel, dim3(main.num_blocks), dim3(kNumThreads), sizeof(SharedMemory),
                  stream, params, maps, main.lse_log2, main.neg_delta, main.dq_accum,
                  main.first_n_block, main.heads_at_once);
  });
}

void describe_workspace(const ForwardParams&, WorkspaceLayout&) {}

cudaError_t launch_forward(const ForwardParams& params, void*, cudaStream_t stream) {
  if (!rows_are_aligned(params)) return cudaErrorInvalidValue;
  TensorMapMaker map{params};
  const ForwardTensorMaps maps{map("q", params.q, params.q_strides, params.seqlen_q, kForwardM),
                               map("k", params.k, params.k_strides, params.seqlen_k, kForwardN),
                               map("v", params.v, params.v_strides, params.seqlen_k, kForwardN)};
  if (map.error != cudaSuccess) return map.error;
  int device = 0, num_sms = 1;
  cudaGetDevice(&device);
  const cudaError_t error =
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const int heads = params.batch * params.num_heads;
  const int num_tiles = heads * ((params.seqlen_q + kForwardM - 1) / kForwardM);
  // With a causal mask, as many heads as the L2 cache keeps the keys and values of.
  constexpr int64_t kBytes = 32 * 1024 * 1024;
  const int64_t fitting = kBytes / (int64_t(params.seqlen_k) * kHeadDim * 2 * sizeof(Element));
  const int together =
      params.is_causal ? static_cast<int>(max(int64_t(1), min(fitting, int64_t(heads)))) : 1;
  // A block on each SM loads the next tile of queries while it finishes one. But tiles that are long, and not equally
  // so, are better given to whichever SM is free.
  const bool is_one_each = params.is_causal && kPaddedDim == 128 && params.seqlen_k >= 2048;
  const int num_blocks = is_one_each ? num_tiles : min(num_tiles, min(num_sms, FA2_MAX_GRID_Y));
  return launch(forward_kernel, dim3(num_blocks), dim3(kForwardThreads),
                sizeof(ForwardSharedMemory), stream, params, maps, together);
}
