// 11_warp_roles: half of the warps make S, P and dV, the other half dP, dS and dK.
//
//   delta = rowsum(O ∘ dO)
//   Sᵀ = softmax_scale · K Qᵀ   Pᵀ = exp(Sᵀ - lse)   dPᵀ = V dOᵀ   dSᵀ = Pᵀ ∘ (dPᵀ - delta)
//   dV += Pᵀ dO                 dK += softmax_scale · dSᵀ Q        dQ_accum[split] += dS K
//   dQ = softmax_scale · Σ dQ_accum[split]
//
// The change: a warp has one accumulator, of dV or of dK, and so 32 keys instead of 16: what it loads of Q and dO
// serves twice as many products. Warp w of the P role and its partner of the dS role own the same keys in the
// same registers, so P goes from thread to thread. The P role works a tile ahead: its exponentials run beside
// the other's products.
//
//   iteration i   P role:  dV(i)     S(i + 1)   P(i + 1)   dQ(i - 1), its share
//                 dS role: dQ(i - 1), its share   dP(i)   dS(i)   dK(i)
//
// Grid and global scratch: as in 10. Block: two warps for every 32 keys.
// Shared memory: K, V; two stages of dO, P, dS; three of Q.
#include "common/cuda/alignment.h"
#include "common/cuda/architecture.h"
#include "common/cuda/async_copy.h"
#include "common/cuda/attention.h"
#include "common/cuda/barrier.h"
#include "common/cuda/dq_accumulator.h"
#include "common/cuda/launch.h"
#include "common/cuda/schedule.h"
#include "common/cuda/swizzle.h"
#include "common/cuda/tensor_core.h"
#include "common/cuda/warp_product.h"

namespace {

static_assert(sizeof(Element) == 2, "tensor cores multiply fp16 or bf16 here; for fp32 use 08");

constexpr int kPaddedDim = kHeadDim <= 64 ? 64 : 128;  // a tile's row is 128 or 256 bytes

// The largest tiles that fit: queries and keys.
struct TileShape {
  int m, n;
};
constexpr TileShape tile_shape() {
  if (kMaxSharedBytes >= 227 * 1024) return TileShape{64, 128};
  if (kMaxSharedBytes >= 163 * 1024) return TileShape{kPaddedDim == 64 ? 64 : 32, 128};
  return TileShape{kPaddedDim == 64 ? 64 : 32, 64};
}
constexpr int kBlockM = tile_shape().m;
constexpr int kBlockN = tile_shape().n;
constexpr int kSlices = kBlockM / 16;    // of 16 queries
constexpr int kNumPairs = kBlockN / 32;  // warps of a role
constexpr int kRoleThreads = 32 * kNumPairs;
constexpr int kNumThreads = 2 * kRoleThreads;

// With few columns, a warp's rows of K (P role) or V (dS role) fit into its registers, and of its columns of K, for
// its share of dQ, the first kKeptRows.
constexpr bool kKeysInRegisters = kPaddedDim == 64;

using Sizes = BackwardSizes<kBlockM, kBlockN, kPaddedDim>;

// A warp's share of dQ.
constexpr int kRowsDq = kPaddedDim == 64 ? 16 : 32;
constexpr int kColsDq = kBlockM * kPaddedDim / kRowsDq / (2 * kNumPairs);
constexpr int kKeptRows = kKeysInRegisters ? 2048 / kColsDq : 0;  // 32 registers

constexpr int kStagesQ = 3;  // read for S, read for dK, being copied
constexpr int kStages = 2;

struct SharedMemory {
  Element sK[kBlockN][kPaddedDim];
  Element sV[kBlockN][kPaddedDim];
  Element sQ[kStagesQ][kBlockM][kPaddedDim];
  Element sdO[kStages][kBlockM][kPaddedDim];
  Element sdS[kStages][kBlockN][kBlockM];  // transposed: a row is a key
  // P of 16 queries and 16 keys at a time, as a lane holds it.
  uint4 sP_high[kStages][kNumPairs][kSlices][2][32];
  uint2 sP_low[kStages][kNumPairs][kSlices][2][32];
  float lse_log2[kStages][kBlockM];
  float neg_delta[kStages][kBlockM];
};
static_assert(sizeof(SharedMemory) <= kMaxSharedBytes, "of a block");

// ---------------------------------------------------------------- copies

// Starts copying rows [row_start, row_start + kRows) of a matrix with num_rows rows into a tile, by the threads
// of one role. What lies past the matrix' end becomes zeros. In pieces, so that they can be issued between
// products.
template <int kRows>
struct TileCopy {
  static constexpr int kChunks = kPaddedDim / 8;  // of a row
  static constexpr int kStep = kRoleThreads / kChunks;
  static constexpr int kPieces = kRows / kStep;
  static_assert(kRows % kStep == 0, "every thread copies as many");

  Element (*tile)[kPaddedDim];
  const Element* source;  // of this thread's first piece
  int64_t row_stride;
  int first_row, col, rows_left;  // rows of the matrix from first_row on

  __device__ TileCopy(Element (*tile)[kPaddedDim], const Element* matrix, int64_t row_stride,
                      int row_start, int num_rows)
      : tile(tile),
        row_stride(row_stride),
        first_row(threadIdx.x % kRoleThreads / kChunks),
        col(threadIdx.x % kChunks * 8) {
    source = matrix + (row_start + first_row) * row_stride + col;
    rows_left = col < kHeadDim ? num_rows - row_start - first_row : 0;
  }
  __device__ void start(int piece) const {
    const int row = first_row + piece * kStep;
    cp_async_16(&tile[row][swizzle<kPaddedDim>(row, col)], source + piece * kStep * row_stride,
                piece * kStep < rows_left);
  }
  __device__ void start_all() const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) start(piece);
  }
};

// Starts copying kBlockM numbers, of rows that exist: the scratch arrays are padded to whole tiles. By one warp of a
// role.
__device__ void copy_statistics(int warp, float* target, const float* source) {
  const int i = 4 * (static_cast<int>(threadIdx.x % kRoleThreads) - 32 * warp);
  if (0 <= i && i < kBlockM) cp_async_16(target + i, source + i);
}

// ---------------------------------------------------------------- a product in slices

// acc [32, 16] = A Bᵀ, A in registers, for one slice of 16 rows of B after the other. begin(j, acc) fills
// the accumulator of slice j, finish(j, part, acc) takes a quarter of it (part / 2: rows, part % 2: columns)
// while the next slice is multiplied.
template <typename Begin, typename Finish>
__device__ void product_by_slices(const uint32_t (&a)[kPaddedDim / 16][2][4],
                                  const Element (*b)[kPaddedDim], LaneOffset<kPaddedDim> lane,
                                  Begin begin, Finish finish) {
  static_assert(!kKeysInRegisters || kPaddedDim / 16 == 4, "a quarter for each step");
  float acc[2][2][2][4];
#pragma unroll
  for (int j = 0; j < kSlices; ++j) {
    begin(j, acc[j % 2]);
#pragma unroll
    for (int k = 0; k < kPaddedDim / 16; ++k) {
      uint32_t fragment_b[4];
      ldmatrix(fragment_b, at(b, 16 * j, 16 * k, lane.second));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma<Element>(acc[j % 2][i][0], a[k][i], fragment_b[0], fragment_b[1]);
        mma<Element>(acc[j % 2][i][1], a[k][i], fragment_b[2], fragment_b[3]);
      }
      if (j > 0) finish(j - 1, k, acc[(j - 1) % 2]);
    }
  }
#pragma unroll
  for (int part = 0; part < 4; ++part) finish(kSlices - 1, part, acc[(kSlices - 1) % 2]);
}

// ---------------------------------------------------------------- P for the other role

// P crosses as the upper 24 bits of fp32: 16 of them in one array, 8 in another. With fewer, dS would be rounded
// twice.
struct CrossingP {
  uint4 high;  // two numbers in each: those of p[0][0], p[0][1] in high.x and so on
  uint2 low;   // four numbers in each
};
// Of a lane's eight numbers: 8 queries (half) by four elements.
__device__ CrossingP cut(const float (&p)[2][4]) {
  uint32_t high[2][2], low[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = __float_as_uint(p[half][e]);
    high[half][0] = __byte_perm(x[0], x[1], 0x7632);
    high[half][1] = __byte_perm(x[2], x[3], 0x7632);
    low[half] =
        __byte_perm(__byte_perm(x[0], x[1], 0x0051), __byte_perm(x[2], x[3], 0x0051), 0x5410);
  }
  return {make_uint4(high[0][0], high[0][1], high[1][0], high[1][1]), make_uint2(low[0], low[1])};
}
__device__ void join(float (&p)[2][4], CrossingP cut) {
  const uint32_t high[2][2] = {{cut.high.x, cut.high.y}, {cut.high.z, cut.high.w}};
  const uint32_t low[2] = {cut.low.x, cut.low.y};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Byte 1 is the low one; byte 0, below all that counts, is any.
    p[half][0] = __uint_as_float(__byte_perm(high[half][0], low[half], 0x1044));
    p[half][1] = __uint_as_float(__byte_perm(high[half][0], low[half], 0x3255));
    p[half][2] = __uint_as_float(__byte_perm(high[half][1], low[half], 0x1066));
    p[half][3] = __uint_as_float(__byte_perm(high[half][1], low[half], 0x3277));
  }
}

// ---------------------------------------------------------------- the main kernel

// What a warp knows of the block of keys it works on.
struct Block {
  SharedMemory& smem;
  const BackwardParams& params;
  const Element *q, *dout;            // of this head: [seqlen_q, kHeadDim]
  const float *lse_log2, *neg_delta;  // [all padded rows]
  float* dq;                          // [all padded rows, kPaddedDim], in the order of fragments
  int first_row;                      // of this head in these
  int n_start;
  QueryTiles<kBlockM> m_blocks;
  int pair, lane;  // warp of its role; its keys are [n_start + 32 pair, n_start + 32 pair + 32)
  LaneOffset<kPaddedDim> lane_offset;
  LaneOffset<kBlockM> lane_offset_ds;

  __device__ TileCopy<kBlockM> copy_q(int i) const {
    return {smem.sQ[i % kStagesQ], q, params.q_strides.row, m_blocks[i] * kBlockM,
            i < m_blocks.count ? params.seqlen_q : 0};
  }
  __device__ void copy_lse(int i) const {
    copy_statistics(1, smem.lse_log2[i % kStages], lse_log2 + (first_row + m_blocks[i] * kBlockM));
  }
  __device__ TileCopy<kBlockM> copy_dout(int i) const {
    return {smem.sdO[i % kStages], dout, params.dout_strides.row, m_blocks[i] * kBlockM,
            i < m_blocks.count ? params.seqlen_q : 0};
  }
  __device__ void copy_delta(int i) const {
    copy_statistics(0, smem.neg_delta[i % kStages],
                    neg_delta + (first_row + m_blocks[i] * kBlockM));
  }

  __device__ bool is_masked(int i) const {
    return needs_mask<kBlockN>(params, m_blocks[i] * kBlockM, n_start);
  }
  // Sets to zero what is hidden of the 16x8 elements at keys 16 row, queries 8 col of tile i.
  __device__ void hide(float (&x)[4], int i, int row, int col) const {
    const Mask mask(params, m_blocks[i] * kBlockM + lane % 4 * 2, n_start + 32 * pair + lane / 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (mask.hides(8 * col + e % 2, 16 * row + e / 2 * 8)) x[e] = 0.0f;
    }
  }
  // The numbers of two neighbouring queries that this lane's elements belong to.
  __device__ float2 statistics(const float* tile, int col) const {
    return *reinterpret_cast<const float2*>(tile + 8 * col + lane % 4 * 2);
  }

  __device__ void load_k(uint32_t (&fragment)[4], int row, int col) const {
    ldmatrix_trans(fragment, at(smem.sK, row, col, lane_offset.first));
  }

  // Writes scale · acc, the 32 rows of this warp, to dK or dV of the head.
  __device__ void store(Element* gradient, Element (*tile)[kPaddedDim],
                        const float (&acc)[2][kPaddedDim / 8][4], float scale) const {
    store_rows(gradient, acc, scale, n_start + 32 * pair, params.seqlen_k, tile + 32 * pair,
               lane_offset);
  }
};

// A warp's 32 rows of K or V as the A of a product.
__device__ void load_keys(uint32_t (&keys)[kPaddedDim / 16][2][4],
                          const Element (*rows)[kPaddedDim], LaneOffset<kPaddedDim> lane_offset) {
#pragma unroll
  for (int k = 0; k < kPaddedDim / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) ldmatrix(keys[k][i], at(rows, 16 * i, 16 * k, lane_offset.first));
  }
}

// A warp's share of dQ.
struct DqShare {
  const Block& block;
  int row, col;  // where it begins
  uint32_t kept[kKeptRows / 16 + 1][kColsDq / 16]
               [4];  // of K; one more, for there is no array of none

  __device__ DqShare(const Block& block, int warp)
      : block(block),
        row(warp / (kPaddedDim / kColsDq) * kRowsDq),
        col(warp % (kPaddedDim / kColsDq) * kColsDq) {
#pragma unroll
    for (int k = 0; k < kKeptRows; k += 16) {
#pragma unroll
      for (int j = 0; j < kColsDq; j += 16) block.load_k(kept[k / 16][j / 16], k, col + j);
    }
  }
  // dQ_accum += dS K, of tile i
  __device__ void add(int i) const {
    float acc_dq[kRowsDq / 16][kColsDq / 8][4] = {};
    const auto load_k = [&](uint32_t (&fragment)[4], int k, int j) {
      if (k < kKeptRows) {
#pragma unroll
        for (int n = 0; n < 4; ++n) fragment[n] = kept[k / 16][j / 16][n];
      } else {
        block.load_k(fragment, k, col + j);
      }
    };
    add_product_at<kBlockN>(acc_dq, block.smem.sdS[i % kStages], row, block.lane_offset_ds, load_k);
    add_to_dq<kPaddedDim>(block.dq, block.first_row + block.m_blocks[i] * kBlockM + row, col,
                          acc_dq);
  }
};

// The P role: S, P and dV.
__device__ void p_role(const Block& block, Element* dv) {
  SharedMemory& smem = block.smem;
  const float scale_log2 = block.params.softmax_scale * kLog2e;
  uint32_t keys[kPaddedDim / 16][2][4];
  if constexpr (kKeysInRegisters) {
    load_keys(keys, smem.sK + 32 * block.pair, block.lane_offset);
  }
  const DqShare dq(block, block.pair);
  uint32_t p[kSlices][2][4];  // rounded: the A of dV

  // P of tile i, in registers and for the partner.
  const auto make_p = [&](int i, auto is_masked) {
    constexpr bool kMasked = decltype(is_masked)::value;
    const Element(*sQ)[kPaddedDim] = smem.sQ[i % kStagesQ];
    float2 lse[2];
    float x[2][4];
    // 2. P = exp(S - lse), of rows 16 row and queries 16 j + 8 half
    const auto exponentiate = [&](int j, int row, int half, const float (&s)[4]) {
      if (row == 0 && half == 0) {
        lse[0] = block.statistics(smem.lse_log2[i % kStages], 2 * j);
        lse[1] = block.statistics(smem.lse_log2[i % kStages], 2 * j + 1);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[half][e] = fast_exp2(fmaf(s[e], scale_log2, e % 2 == 0 ? lse[half].x : lse[half].y));
      }
      // After the scale, which may be zero or negative, for then no score would be low enough.
      if (kMasked) block.hide(x[half], i, row, 2 * j + half);
      p[j][row][2 * half] = pack<Element>(x[half][0], x[half][1]);
      p[j][row][2 * half + 1] = pack<Element>(x[half][2], x[half][3]);
      if (half == 1) {
        const CrossingP crossing = cut(x);
        smem.sP_high[i % kStages][block.pair][j][row][block.lane] = crossing.high;
        smem.sP_low[i % kStages][block.pair][j][row][block.lane] = crossing.low;
      }
    };
    // 1. Sᵀ = K Qᵀ  [32, kBlockM], not scaled yet
    if constexpr (kKeysInRegisters) {
      product_by_slices(
          keys, sQ, block.lane_offset,
          [&](int, float (&acc)[2][2][4]) {
#pragma unroll
            for (int n = 0; n < 16; ++n) acc[n / 8][n / 4 % 2][n % 4] = 0.0f;
          },
          [&](int j, int part, float (&acc)[2][2][4]) {
            exponentiate(j, part / 2, part % 2, acc[part / 2][part % 2]);
          });
    } else {
      float acc_s[2][kBlockM / 8][4] = {};
      add_product_bt(acc_s, smem.sK + 32 * block.pair, sQ, block.lane_offset);
#pragma unroll
      for (int j = 0; j < kSlices; ++j) {
#pragma unroll
        for (int n = 0; n < 4; ++n) exponentiate(j, n / 2, n % 2, acc_s[n / 2][2 * j + n % 2]);
      }
    }
  };

  float acc_dv[2][kPaddedDim / 8][4] = {};
  with_mask(block.is_masked(0), [&](auto is_masked) { make_p(0, is_masked); });
  for (int i = 0; i < block.m_blocks.count; ++i) {
    // P(i), dS(i - 1) and the tiles dO(i) and Q(i + 1) are complete; P(i - 1), dS(i - 2), dO(i - 1), Q(i - 1) and
    // lse(i) are not read any more.
    barrier_sync(0, kNumThreads);
    // 5. dV += Pᵀ dO  [32, kPaddedDim]
    add_product_ra(acc_dv, p, smem.sdO[i % kStages], block.lane_offset, [](int) {});
    if (i + 1 < block.m_blocks.count) {
      with_mask(block.is_masked(i + 1), [&](auto is_masked) { make_p(i + 1, is_masked); });
    }
    // 7. dQ_accum += dS K, of the tile before: by then the other warps' keys are there
    if (i > 0) dq.add(i - 1);
  }
  barrier_sync(0, kNumThreads);  // dS of the last tile is complete
  dq.add(block.m_blocks.count - 1);
  barrier_sync(0, kNumThreads);  // sK is not read any more
  block.store(dv, smem.sV, acc_dv, 1.0f);
}

// The dS role: dP, dS and dK.
__device__ void ds_role(const Block& block, Element* dk) {
  SharedMemory& smem = block.smem;
  uint32_t values[kPaddedDim / 16][2][4];
  if constexpr (kKeysInRegisters) {
    load_keys(values, smem.sV + 32 * block.pair, block.lane_offset);
  }
  const DqShare dq(block, kNumPairs + block.pair);

  float acc_dk[2][kPaddedDim / 8][4] = {};
  for (int i = 0; i < block.m_blocks.count; ++i) {
    cp_async_wait<0>();
    barrier_sync(0, kNumThreads);  // as in the P role
    // First of all, for one warp each copies them, and the others wait for it.
    if (i + 1 < block.m_blocks.count) block.copy_delta(i + 1);
    if (i + 2 < block.m_blocks.count) block.copy_lse(i + 2);
    block.copy_dout(i + 1).start_all();
    if (i > 0) dq.add(i - 1);

    const Element(*sdO)[kPaddedDim] = smem.sdO[i % kStages];
    uint32_t ds[kSlices][2][4];
    // 4. dS = P ∘ (dP - delta), of rows 16 row and queries 16 j + 8 half
    const auto make_ds = [&](int j, int row, int half, const float (&p)[2][4],
                             const float (&dp)[4]) {
      ds[j][row][2 * half] = pack<Element>(p[half][0] * dp[0], p[half][1] * dp[1]);
      ds[j][row][2 * half + 1] = pack<Element>(p[half][2] * dp[2], p[half][3] * dp[3]);
      if (half == 1) {
        stmatrix(at(smem.sdS[i % kStages], 32 * block.pair + 16 * row, 16 * j,
                    block.lane_offset_ds.first),
                 ds[j][row]);
      }
    };
    const auto start_at_minus_delta = [&](float (&upper)[4], float (&lower)[4], int col) {
      const float2 x = block.statistics(smem.neg_delta[i % kStages], col);
      upper[0] = upper[2] = lower[0] = lower[2] = x.x;
      upper[1] = upper[3] = lower[1] = lower[3] = x.y;
    };
    const auto load_p = [&](int j, int row) {
      CrossingP crossing;
      crossing.high = smem.sP_high[i % kStages][block.pair][j][row][block.lane];
      crossing.low = smem.sP_low[i % kStages][block.pair][j][row][block.lane];
      return crossing;
    };
    // 3. dPᵀ - delta = V dOᵀ - delta, for the accumulator starts at -delta. What the mask hides becomes zero:
    // P = 0 alone is not enough, as a hidden dP may be infinite or NaN, and 0 · inf = NaN.
    const auto make_tile = [&](auto is_masked) {
      constexpr bool kMasked = decltype(is_masked)::value;
      if constexpr (kKeysInRegisters) {
        CrossingP crossing[2][2];
        float p[2][4];
        product_by_slices(
            values, sdO, block.lane_offset,
            [&](int j, float (&acc)[2][2][4]) {
#pragma unroll
              for (int n = 0; n < 2; ++n) start_at_minus_delta(acc[0][n], acc[1][n], 2 * j + n);
#pragma unroll
              for (int row = 0; row < 2; ++row) crossing[j % 2][row] = load_p(j, row);
            },
            [&](int j, int part, float (&acc)[2][2][4]) {
              if (kMasked && part == 0) {
#pragma unroll
                for (int n = 0; n < 4; ++n) block.hide(acc[n / 2][n % 2], i, n / 2, 2 * j + n % 2);
              }
              if (part % 2 == 0) join(p, crossing[j % 2][part / 2]);
              make_ds(j, part / 2, part % 2, p, acc[part / 2][part % 2]);
            });
      } else {
        float acc_dp[2][kBlockM / 8][4];
#pragma unroll
        for (int col = 0; col < kBlockM / 8; ++col) {
          start_at_minus_delta(acc_dp[0][col], acc_dp[1][col], col);
        }
        add_product_bt(acc_dp, smem.sV + 32 * block.pair, sdO, block.lane_offset);
        if (kMasked) {
#pragma unroll
          for (int n = 0; n < kBlockM / 4; ++n) block.hide(acc_dp[n % 2][n / 2], i, n % 2, n / 2);
        }
        constexpr int kAhead = 3;  // P is loaded so many steps before it is needed
        CrossingP crossing[kAhead + 1];
#pragma unroll
        for (int n = 0; n < kAhead; ++n) crossing[n] = load_p(n / 2, n % 2);
#pragma unroll
        for (int n = 0; n < 2 * kSlices; ++n) {
          const int next = n + kAhead;
          if (next < 2 * kSlices) crossing[next % (kAhead + 1)] = load_p(next / 2, next % 2);
          float p[2][4];
          join(p, crossing[n % (kAhead + 1)]);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            make_ds(n / 2, n % 2, half, p, acc_dp[n % 2][n / 2 * 2 + half]);
          }
        }
      }
    };
    with_mask(block.is_masked(i), make_tile);
    // 6. dK += dSᵀ Q  [32, kPaddedDim], and beside it the copy of Q two tiles ahead
    const TileCopy<kBlockM> copy = block.copy_q(i + 2);
    add_product_ra(acc_dk, ds, smem.sQ[i % kStagesQ], block.lane_offset, [&](int step) {
      constexpr int kEvery = kSlices * (kPaddedDim / 16) / TileCopy<kBlockM>::kPieces / 2;
      if (step % kEvery == 0 && step / kEvery < TileCopy<kBlockM>::kPieces)
        copy.start(step / kEvery);
    });
    cp_async_commit();
  }
  barrier_sync(0, kNumThreads);  // dS of the last tile is complete
  dq.add(block.m_blocks.count - 1);
  barrier_sync(0, kNumThreads);  // sK is not read any more
  block.store(dk, smem.sK, acc_dk, block.params.softmax_scale);
}

// Outer K: a block owns kBlockN keys of one head and walks over the queries. The grid has the blocks of keys from
// first_n_block on, as many for each head.
__global__ void __launch_bounds__(kNumThreads, 1)
    backward_kernel(const BackwardParams params, const float* lse_log2, const float* neg_delta,
                    float* dq_accum, int first_n_block, int heads_at_once) {
  SharedMemory& smem = *dynamic_smem<SharedMemory>();
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const Sizes sizes(params);
  const GridPlace place(static_cast<int>(sizes.heads), heads_at_once);
  const int batch = place.head / params.num_heads, head = place.head % params.num_heads;
  const int64_t split = params.deterministic ? place.n_block : 0;
  const int n_start = (first_n_block + place.n_block) * kBlockN;
  const Block block{smem,
                    params,
                    params.q + params.q_strides.offset(batch, head),
                    params.dout + params.dout_strides.offset(batch, head),
                    lse_log2,
                    neg_delta,
                    dq_accum + split * sizes.split_elements(),
                    static_cast<int>(place.head * sizes.padded_rows),
                    n_start,
                    QueryTiles<kBlockM>(params, n_start),
                    warp % kNumPairs,
                    static_cast<int>(threadIdx.x % 32),
                    {},
                    {}};
  const int64_t first_row = int64_t(place.head) * params.seqlen_k;  // of this head in dk and dv
  if (warp < kNumPairs) {
    const Element* k = params.k + params.k_strides.offset(batch, head);  // [seqlen_k, kHeadDim]
    TileCopy<kBlockN>(smem.sK, k, params.k_strides.row, n_start, params.seqlen_k).start_all();
    block.copy_dout(0).start_all();
    block.copy_delta(0);
  } else {
    const Element* v = params.v + params.v_strides.offset(batch, head);  // [seqlen_k, kHeadDim]
    TileCopy<kBlockN>(smem.sV, v, params.v_strides.row, n_start, params.seqlen_k).start_all();
    block.copy_q(0).start_all();
    block.copy_lse(0);
    block.copy_q(1).start_all();
    if (block.m_blocks.count > 1) block.copy_lse(1);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();  // K, V and the first tiles are complete
  if (warp < kNumPairs) {
    p_role(block, params.dv + first_row * kHeadDim);
  } else {
    ds_role(block, params.dk + first_row * kHeadDim);
  }
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
