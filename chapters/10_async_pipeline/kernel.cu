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
// adds 512 bytes in one piece; the blocks of a head run side by side, so that its dQ_accum stays in the L2
// cache, those with the most queries first.
//
// Grid: (batch · num_heads · blocks of keys; with deterministic, splits). Block: a warp for every 16 keys.
// Shared memory: K, V; two stages of Q, dO, dS. Global scratch: lse_log2, neg_delta, dq_accum.
#include "common/cuda/alignment.h"
#include "common/cuda/architecture.h"
#include "common/cuda/async_copy.h"
#include "common/cuda/attention.h"
#include "common/cuda/launch.h"
#include "common/cuda/reduce.h"
#include "common/cuda/tensor_core.h"

namespace {

static_assert(sizeof(Element) == 2, "tensor cores multiply fp16 or bf16 here; for fp32 use 08");

constexpr int kPaddedDim = kHeadDim <= 64 ? 64 : 128;  // a tile's row is 128 or 256 bytes
constexpr int kNumStages = 2;
constexpr int kMaxSplits = 8;  // with deterministic
constexpr float kLog2e = 1.44269504f;

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

// ---------------------------------------------------------------- swizzled tiles

// ldmatrix reads the same 16-byte chunk of 8 rows, and would find them in the same banks. So chunk c of row r
// lies at chunk c ^ (r % 8); rows of 64 bytes, of which two share the 32 banks, at c ^ (r / 2 % 4).
template <int kCols>
__device__ int swizzle(int row, int col) {
  static_assert(kCols == 32 || kCols == 64 || kCols == 128, "64, 128 or 256 bytes");
  return kCols == 32 ? col ^ row / 2 % 4 * 8 : col ^ row % 8 * 8;
}

// Where a lane points ldmatrix within 16 rows and columns of a tile, as an offset in bytes. Four 8x8
// matrices: in `first`, down, then right; in `second`, right, then down.
template <int kCols>
struct LaneOffset {
  int first, second;

  __device__ LaneOffset() {
    const int lane = threadIdx.x % 32;
    first = 2 * (lane % 16 * kCols + swizzle<kCols>(lane % 16, lane / 16 * 8));
    second = 2 * ((lane % 8 + lane / 16 * 8) * kCols + swizzle<kCols>(lane % 8, lane / 8 % 2 * 8));
  }
};

// The address of a lane's row for the 16x16 elements at (row, col), both multiples of 16.
template <int kCols>
__device__ const void* at(const Element (*tile)[kCols], int row, int col, int lane_offset) {
  return reinterpret_cast<const char*>(tile[row]) + (lane_offset ^ 2 * col);
}
template <int kCols>
__device__ void* at(Element (*tile)[kCols], int row, int col, int lane_offset) {
  return reinterpret_cast<char*>(tile[row]) + (lane_offset ^ 2 * col);
}

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

// ---------------------------------------------------------------- products of one warp

// acc [16 kRowTiles, 8 kColTiles] += A Bᵀ, A rows [row_a, ...) and B rows [0, 8 kColTiles) of two tiles.
template <int kRowTiles, int kColTiles>
__device__ void add_product_bt(float (&acc)[kRowTiles][kColTiles][4],
                               const Element (*a)[kPaddedDim], const Element (*b)[kPaddedDim],
                               LaneOffset<kPaddedDim> lane) {
#pragma unroll
  for (int k = 0; k < kPaddedDim; k += 16) {
    uint32_t fragment_a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) ldmatrix(fragment_a[i], at(a, 16 * i, k, lane.first));
#pragma unroll
    for (int j = 0; j < kColTiles; j += 2) {
      uint32_t fragment_b[4];
      ldmatrix(fragment_b, at(b, 8 * j, k, lane.second));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma<Element>(acc[i][j], fragment_a[i], fragment_b[0], fragment_b[1]);
        mma<Element>(acc[i][j + 1], fragment_a[i], fragment_b[2], fragment_b[3]);
      }
    }
  }
}

// acc [16 kRowTiles, kPaddedDim] += A B, A in registers, kInner rows of B in shared memory.
template <int kRowTiles, int kInnerTiles>
__device__ void add_product_ra(float (&acc)[kRowTiles][kPaddedDim / 8][4],
                               const uint32_t (&a)[kRowTiles][kInnerTiles][4],
                               const Element (*b)[kPaddedDim], LaneOffset<kPaddedDim> lane) {
#pragma unroll
  for (int k = 0; k < kInnerTiles; ++k) {
#pragma unroll
    for (int j = 0; j < kPaddedDim / 8; j += 2) {
      uint32_t fragment_b[4];
      ldmatrix_trans(fragment_b, at(b, 16 * k, 8 * j, lane.first));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma<Element>(acc[i][j], a[i][k], fragment_b[0], fragment_b[1]);
        mma<Element>(acc[i][j + 1], a[i][k], fragment_b[2], fragment_b[3]);
      }
    }
  }
}

// ---------------------------------------------------------------- before and after

__host__ __device__ int num_m_blocks(const BackwardParams& params) {
  return (params.seqlen_q + kBlockM - 1) / kBlockM;
}
__host__ __device__ int num_n_blocks(const BackwardParams& params) {
  return (params.seqlen_k + kBlockN - 1) / kBlockN;
}
// The number of accumulators of a head.
__host__ __device__ int num_splits(const BackwardParams& params) {
  return params.deterministic ? min(num_n_blocks(params), kMaxSplits) : 1;
}
// Rows of a head in the scratch arrays: whole tiles.
__host__ __device__ int64_t padded_rows(const BackwardParams& params) {
  return int64_t(num_m_blocks(params)) * kBlockM;
}
// Elements of dq_accum that belong to one split.
__host__ __device__ int64_t split_elements(const BackwardParams& params) {
  return int64_t(params.batch) * params.num_heads * padded_rows(params) * kPaddedDim;
}

// The sum of the products of eight elements.
__device__ float dot(uint4 x, uint4 y) {
  const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 c = unpack<Element>(a[i]), d = unpack<Element>(b[i]);
    sum += c.x * d.x + c.y * d.y;
  }
  return sum;
}

// neg_delta = -rowsum(O ∘ dO) and lse_log2 = -lse · log2 e, and zeros in dq_accum. A row that sees no key
// (lse = -inf) and a row past the last get lse_log2 = -inf, which makes their P zero.
constexpr int kThreadsPerRow = kPaddedDim / 8;
constexpr int kRowsAtOnce = 256 / kThreadsPerRow;
constexpr int kRowsPerThread = 4;  // many loads under way hide their latency
__global__ void __launch_bounds__(256) prepare_kernel(const BackwardParams params, float* lse_log2,
                                                      float* neg_delta, float* dq_accum) {
  const int batch = blockIdx.x / params.num_heads, head = blockIdx.x % params.num_heads;
  const Element* out = params.out + params.out_strides.offset(batch, head);
  const Element* dout = params.dout + params.dout_strides.offset(batch, head);
  const float* lse = params.lse + int64_t(blockIdx.x) * params.seqlen_q;
  const int64_t head_row = blockIdx.x * padded_rows(params);
  const int col = threadIdx.x % kThreadsPerRow * 8;
  for (int64_t first_row =
           blockIdx.y * (kRowsPerThread * kRowsAtOnce) + threadIdx.x / kThreadsPerRow;
       first_row < padded_rows(params); first_row += gridDim.y * (kRowsPerThread * kRowsAtOnce)) {
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
      if (row >= padded_rows(params)) continue;
      if (col == 0) {
        const float row_lse = row < params.seqlen_q ? lse[row] : -INFINITY;
        lse_log2[head_row + row] = row_lse == -INFINITY ? -INFINITY : -row_lse * kLog2e;
        neg_delta[head_row + row] = -sum;
      }
      for (int split = 0; split < num_splits(params); ++split) {
        float* accum = dq_accum + split * split_elements(params) + (head_row + row) * kPaddedDim;
        // A thread's 16 bytes beside those of its neighbours.
        *reinterpret_cast<float4*>(accum + col / 2) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        *reinterpret_cast<float4*>(accum + kPaddedDim / 2 + col / 2) =
            make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
  }
}

// dQ = softmax_scale · Σ dQ_accum[split], in the order of the splits, rounded to the output's dtype. dq_accum
// is [rows / 16][kPaddedDim / 8][lane][4]; a thread takes what four lanes hold: 8 columns of two rows.
__global__ void __launch_bounds__(256)
    convert_kernel(const BackwardParams params, const float* dq_accum) {
  constexpr int kCols = kHeadDim / 8;
  const int64_t num_pieces = padded_rows(params) / 2 * kCols;  // of one head
  const float* head_accum = dq_accum + blockIdx.x * padded_rows(params) * kPaddedDim;
  Element* dq = params.dq + int64_t(blockIdx.x) * params.seqlen_q * kHeadDim;
  for (int64_t i = int64_t(blockIdx.y) * 256 + threadIdx.x; i < num_pieces;
       i += int64_t(gridDim.y) * 256) {
    const int64_t row = i / kCols / 8 * 16 + i / kCols % 8;
    const int col = i % kCols;
    const float* fragment =
        head_accum + ((row / 16 * (kPaddedDim / 8) + col) * 32 + row % 8 * 4) * 4;
    float4 sum[4] = {};
    for (int split = 0; split < num_splits(params); ++split) {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float4 x = *reinterpret_cast<const float4*>(fragment + 4 * t);
        sum[t].x += x.x, sum[t].y += x.y, sum[t].z += x.z, sum[t].w += x.w;
      }
      fragment += split_elements(params);
    }
    uint32_t upper[4], lower[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      upper[t] = pack<Element>(params.softmax_scale * sum[t].x, params.softmax_scale * sum[t].y);
      lower[t] = pack<Element>(params.softmax_scale * sum[t].z, params.softmax_scale * sum[t].w);
    }
    uint4* target = reinterpret_cast<uint4*>(dq + row * kHeadDim + 8 * col);
    if (row < params.seqlen_q) *target = make_uint4(upper[0], upper[1], upper[2], upper[3]);
    if (row + 8 < params.seqlen_q) {
      target[kHeadDim] = make_uint4(lower[0], lower[1], lower[2], lower[3]);
    }
  }
}

// ---------------------------------------------------------------- the main kernel

// The tiles of queries that a block of keys visits: from the first one in which some query sees a key; without
// a mask all of them, starting at a place that differs from block to block, so that blocks that run side by
// side add to different parts of dq_accum.
struct QueryTiles {
  int first, count, num_m_blocks;

  __device__ QueryTiles(const BackwardParams& params, int n_start)
      : num_m_blocks(::num_m_blocks(params)) {
    if (params.is_causal) {
      const int64_t first_row = int64_t(n_start) - (params.seqlen_k - params.seqlen_q);
      first = static_cast<int>(min(max(first_row, int64_t(0)) / kBlockM, int64_t(num_m_blocks)));
      count = num_m_blocks - first;
    } else {
      first = n_start / kBlockM % num_m_blocks;
      count = num_m_blocks;
    }
  }
  __device__ int operator[](int i) const {
    const int m_block = first + i;
    return m_block < num_m_blocks ? m_block : m_block - num_m_blocks;
  }
};

// Which keys the mask hides, and that there are none past the last. Query q sees the keys up to q + seqlen_k -
// seqlen_q with a causal mask; what lies past the last query has P = 0 anyway.
struct Mask {
  bool is_causal;
  int last_visible;  // key of the first query, or without a mask of any, both counted from the first

  __device__ Mask(const BackwardParams& params, int first_query, int first_key)
      : is_causal(params.is_causal) {
    // Nearer to zero than any int can overflow, farther than any tile is wide.
    const int64_t last = is_causal ? int64_t(first_query) + params.seqlen_k - params.seqlen_q
                                   : int64_t(params.seqlen_k) - 1;
    last_visible = static_cast<int>(min(max(last - first_key, int64_t(-1024)), int64_t(1024)));
  }
  __device__ bool hides(int query, int key) const {
    return is_causal ? key - query > last_visible : key > last_visible;
  }
};

// The mask is needed where a query of the tile does not see every key of it; the first sees the fewest.
__device__ bool needs_mask(const BackwardParams& params, int m_start, int n_start) {
  return n_start + kBlockN > params.num_visible_keys(m_start);
}

// Calls tile(true_type) or tile(false_type): two copies of the code, of which the usual one has no trace of the
// mask. Left to itself, the compiler computes the mask for every tile.
template <typename Tile>
__device__ void with_mask(bool is_masked, Tile tile) {
  if (is_masked) {
    tile(std::true_type{});
  } else {
    tile(std::false_type{});
  }
}

// Outer K: a block owns kBlockN keys of one head and walks over the queries. The grid has the blocks of keys from
// first_n_block on, as many for each head.
__global__ void __launch_bounds__(kNumThreads, 1)
    backward_kernel(const BackwardParams params, const float* lse_log2, const float* neg_delta,
                    float* dq_accum, int first_n_block) {
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

  const int blocks_per_head = gridDim.x / (params.batch * params.num_heads);
  const int head_index = blockIdx.x / blocks_per_head;
  const int batch = head_index / params.num_heads, head = head_index % params.num_heads;
  const Element* q = params.q + params.q_strides.offset(batch, head);  // [seqlen_q, kHeadDim]
  const Element* dout =
      params.dout + params.dout_strides.offset(batch, head);           // [seqlen_q, kHeadDim]
  const Element* k = params.k + params.k_strides.offset(batch, head);  // [seqlen_k, kHeadDim]
  const Element* v = params.v + params.v_strides.offset(batch, head);  // [seqlen_k, kHeadDim]
  const int64_t padded_row = head_index * padded_rows(params);
  const int64_t split = params.deterministic ? blockIdx.x % blocks_per_head : 0;
  const int n_start = (first_n_block + blockIdx.x % blocks_per_head) * kBlockN;
  const QueryTiles m_blocks(params, n_start);
  float* dq = dq_accum + split * split_elements(params) + padded_row * kPaddedDim;

  const auto copy_queries = [&](int m_block, int stage) {
    const int m_start = m_block * kBlockM;
    copy_tile<kBlockM>(smem.sQ[stage], q, params.q_strides.row, m_start, params.seqlen_q);
    copy_tile<kBlockM>(smem.sdO[stage], dout, params.dout_strides.row, m_start, params.seqlen_q);
    copy_statistics(smem.lse_log2[stage], lse_log2 + padded_row + m_start);
    copy_statistics(smem.neg_delta[stage], neg_delta + padded_row + m_start);
  };
  // dQ_accum += dS K, of one tile
  const auto add_dq = [&](int m_block, int stage) {
    constexpr int kTilesAcross = kPaddedDim / kColsDq;
    const int row = warp / kTilesAcross * kRowsDq, col = warp % kTilesAcross * kColsDq;
    float acc_dq[kRowsDq / 16][kColsDq / 8][4] = {};
#pragma unroll
    for (int n = 0; n < kBlockN; n += 16) {
      uint32_t fragment_a[kRowsDq / 16][4];
#pragma unroll
      for (int i = 0; i < kRowsDq / 16; ++i) {
        ldmatrix_trans(fragment_a[i], at(smem.sdS[stage], n, row + 16 * i, lane_offset_ds.second));
      }
#pragma unroll
      for (int j = 0; j < kColsDq / 8; j += 2) {
        uint32_t fragment_b[4];
        ldmatrix_trans(fragment_b, at(smem.sK, n, col + 8 * j, lane_offset.first));
#pragma unroll
        for (int i = 0; i < kRowsDq / 16; ++i) {
          mma<Element>(acc_dq[i][j], fragment_a[i], fragment_b[0], fragment_b[1]);
          mma<Element>(acc_dq[i][j + 1], fragment_a[i], fragment_b[2], fragment_b[3]);
        }
      }
    }
    float* target =
        dq + (int64_t(m_block) * kBlockM + row) * kPaddedDim + (col / 8 * 32 + lane) * 4;
#pragma unroll
    for (int i = 0; i < kRowsDq / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kColsDq / 8; ++j) {
        reduce_add(target + (i * (kPaddedDim / 8) + j) * 128, acc_dq[i][j]);
      }
    }
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
      const float2 x =
          *reinterpret_cast<const float2*>(&smem.neg_delta[stage][8 * j + lane % 4 * 2]);
      acc_dp[0][j][0] = acc_dp[0][j][2] = x.x;
      acc_dp[0][j][1] = acc_dp[0][j][3] = x.y;
    }
    add_product_bt(acc_dp, smem.sV + warp_key, smem.sdO[stage], lane_offset);

    uint32_t p[1][kBlockM / 16][4], ds[1][kBlockM / 16][4];
    const auto make_p_and_ds = [&](auto is_masked) {
      const Mask mask(params, m_start + lane % 4 * 2, n_start + warp_key + lane / 4);
#pragma unroll
      for (int j = 0; j < kBlockM / 8; ++j) {
        const float2 lse =
            *reinterpret_cast<const float2*>(&smem.lse_log2[stage][8 * j + lane % 4 * 2]);
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
          p[0][j / 2][j % 2 * 2 + e / 2] = pack<Element>(x[0], x[1]);
          ds[0][j / 2][j % 2 * 2 + e / 2] = pack<Element>(dx[0], dx[1]);
        }
        if (j % 2 == 1) {
          stmatrix(at(smem.sdS[stage], warp_key, 8 * (j - 1), lane_offset_ds.first), ds[0][j / 2]);
        }
      }
    };
    with_mask(needs_mask(params, m_start, n_start), make_p_and_ds);
    // 5. dV += Pᵀ dO  [16, kPaddedDim]
    add_product_ra(acc_dv, p, smem.sdO[stage], lane_offset);
    // 6. dK += dSᵀ Q  [16, kPaddedDim]
    add_product_ra(acc_dk, ds, smem.sQ[stage], lane_offset);
    // 7. dQ_accum += dS K, of the tile before: by then the other warps' keys are there
    if (i > 0 && !dq_first) add_dq(m_blocks[i - 1], 1 - stage);
  }

  cp_async_wait<0>();
  __syncthreads();  // dS of the last tile is complete
  add_dq(m_blocks[m_blocks.count - 1], (m_blocks.count - 1) % kNumStages);
  __syncthreads();  // sK is not read any more
  // Through shared memory, for rows of memory are longer than those of fragments. A warp uses its own rows.
  const auto store = [&](Element* gradient, Element(*tile)[kPaddedDim],
                         const float (&acc)[1][kPaddedDim / 8][4], float scale) {
#pragma unroll
    for (int j = 0; j < kPaddedDim / 8; j += 2) {
      uint32_t fragment[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* x = &acc[0][j + n / 2][n % 2 * 2];
        fragment[n] = pack<Element>(scale * x[0], scale * x[1]);
      }
      stmatrix(at(tile, 0, 8 * j, lane_offset.first), fragment);
    }
    __syncwarp();  // the rows are complete
    const int64_t first_row = int64_t(head_index) * params.seqlen_k;
#pragma unroll
    for (int n = lane; n < 16 * (kPaddedDim / 8); n += 32) {
      const int row = n / (kPaddedDim / 8), col = n % (kPaddedDim / 8) * 8;
      const int key = n_start + warp_key + row;
      if (key >= params.seqlen_k || col >= kHeadDim) continue;
      *reinterpret_cast<uint4*>(gradient + (first_row + key) * kHeadDim + col) =
          *reinterpret_cast<const uint4*>(&tile[row][swizzle<kPaddedDim>(row, col)]);
    }
  };
  store(params.dk, smem.sK + warp_key, acc_dk, params.softmax_scale);
  store(params.dv, smem.sV + warp_key, acc_dv, 1.0f);
}

}  // namespace

void describe_workspace(const BackwardParams& params, WorkspaceLayout& layout) {
  const int64_t heads = int64_t(params.batch) * params.num_heads;
  layout.add<float>("lse_log2", {heads, padded_rows(params)});
  layout.add<float>("neg_delta", {heads, padded_rows(params)});
  layout.add<float>("dq_accum", {num_splits(params), heads, padded_rows(params), kPaddedDim});
}

cudaError_t launch_backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  if (!rows_are_aligned(params)) return cudaErrorInvalidValue;
  WorkspaceLayout layout;
  describe_workspace(params, layout);
  float* lse_log2 = layout.find<float>(workspace, "lse_log2");
  float* neg_delta = layout.find<float>(workspace, "neg_delta");
  float* dq_accum = layout.find<float>(workspace, "dq_accum");
  const int64_t prepare_blocks =
      (padded_rows(params) + kRowsPerThread * kRowsAtOnce - 1) / (kRowsPerThread * kRowsAtOnce);
  cudaError_t error = launch(prepare_kernel, head_grid(params, prepare_blocks), dim3(256), 0,
                             stream, params, lse_log2, neg_delta, dq_accum);
  if (error != cudaSuccess) return error;
  // With deterministic, a launch has one block of keys for each accumulator, and the stream keeps their order.
  const int num_heads = params.batch * params.num_heads;
  const int step = params.deterministic ? num_splits(params) : num_n_blocks(params);
  for (int n_block = 0; n_block < num_n_blocks(params); n_block += step) {
    error = launch(backward_kernel, dim3(num_heads * min(step, num_n_blocks(params) - n_block)),
                   dim3(kNumThreads), sizeof(SharedMemory), stream, params, lse_log2, neg_delta,
                   dq_accum, n_block);
    if (error != cudaSuccess) return error;
  }
  const int64_t convert_blocks = (padded_rows(params) / 2 * (kHeadDim / 8) + 255) / 256;
  return launch(convert_kernel, head_grid(params, convert_blocks), dim3(256), 0, stream, params,
                dq_accum);
}
