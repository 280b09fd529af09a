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
#include "common/cuda/launch.h"
#include "common/cuda/reduce.h"
#include "common/cuda/tensor_core.h"

namespace {

static_assert(sizeof(Element) == 2, "tensor cores multiply fp16 or bf16 here; for fp32 use 08");

constexpr int kPaddedDim = kHeadDim <= 64 ? 64 : 128;  // a tile's row is 128 or 256 bytes
constexpr int kMaxSplits = 8;                          // with deterministic
constexpr float kLog2e = 1.44269504f;

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

// With few columns, a warp's rows of K (P role) or V (dS role) fit into its registers.
constexpr bool kKeysInRegisters = kPaddedDim == 64;

// A warp's share of dQ.
constexpr int kRowsDq = 32;
constexpr int kColsDq = kBlockM * kPaddedDim / kRowsDq / (2 * kNumPairs);

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
  float lse_log2[kStagesQ][kBlockM];
  float neg_delta[kStages][kBlockM];
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

// Starts copying kBlockM numbers, of rows that exist: the scratch arrays are padded to whole tiles.
__device__ void copy_statistics(float* target, const float* source) {
  const int thread = threadIdx.x % kRoleThreads;
  if (thread < kBlockM / 4) cp_async_16(target + 4 * thread, source + 4 * thread);
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

// acc [16 kRowTiles, kPaddedDim] += A B, A in registers, kInner rows of B in shared memory. between(step) is
// called before each of the kInnerTiles * kPaddedDim / 16 steps.
template <int kRowTiles, int kInnerTiles, typename Between>
__device__ void add_product_ra(float (&acc)[kRowTiles][kPaddedDim / 8][4],
                               const uint32_t (&a)[kInnerTiles][kRowTiles][4],
                               const Element (*b)[kPaddedDim], LaneOffset<kPaddedDim> lane,
                               Between between) {
#pragma unroll
  for (int k = 0; k < kInnerTiles; ++k) {
#pragma unroll
    for (int j = 0; j < kPaddedDim / 8; j += 2) {
      uint32_t fragment_b[4];
      ldmatrix_trans(fragment_b, at(b, 16 * k, 8 * j, lane.first));
      between(k * (kPaddedDim / 16) + j / 2);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma<Element>(acc[i][j], a[k][i], fragment_b[0], fragment_b[1]);
        mma<Element>(acc[i][j + 1], a[k][i], fragment_b[2], fragment_b[3]);
      }
    }
  }
}

// The same as add_product_bt with A in registers, one slice of 16 rows of B after the other. begin(j, acc) fills
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
    const float scale = params.softmax_scale;
    uint32_t upper[4], lower[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      upper[t] = pack<Element>(scale * sum[t].x, scale * sum[t].y);
      lower[t] = pack<Element>(scale * sum[t].z, scale * sum[t].w);
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

// What a warp knows of the block of keys it works on.
struct Block {
  SharedMemory& smem;
  const BackwardParams& params;
  const Element *q, *dout;            // of this head: [seqlen_q, kHeadDim]
  const float *lse_log2, *neg_delta;  // [all padded rows]
  float* dq;                          // [all padded rows, kPaddedDim], in the order of fragments
  int first_row;                      // of this head in these
  int n_start;
  QueryTiles m_blocks;
  int pair, lane;  // warp of its role; its keys are [n_start + 32 pair, n_start + 32 pair + 32)
  LaneOffset<kPaddedDim> lane_offset;
  LaneOffset<kBlockM> lane_offset_ds;

  __device__ TileCopy<kBlockM> copy_q(int i) const {
    return {smem.sQ[i % kStagesQ], q, params.q_strides.row, m_blocks[i] * kBlockM,
            i < m_blocks.count ? params.seqlen_q : 0};
  }
  __device__ void copy_lse(int i) const {
    copy_statistics(smem.lse_log2[i % kStagesQ], lse_log2 + (first_row + m_blocks[i] * kBlockM));
  }
  __device__ TileCopy<kBlockM> copy_dout(int i) const {
    return {smem.sdO[i % kStages], dout, params.dout_strides.row, m_blocks[i] * kBlockM,
            i < m_blocks.count ? params.seqlen_q : 0};
  }
  __device__ void copy_delta(int i) const {
    copy_statistics(smem.neg_delta[i % kStages], neg_delta + (first_row + m_blocks[i] * kBlockM));
  }

  __device__ bool is_masked(int i) const {
    return needs_mask(params, m_blocks[i] * kBlockM, n_start);
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

  // dQ_accum += dS K, of tile i, the share of one warp
  __device__ void add_dq(int i, int warp) const {
    constexpr int kTilesAcross = kPaddedDim / kColsDq;
    const int row = warp / kTilesAcross * kRowsDq, col = warp % kTilesAcross * kColsDq;
    float acc_dq[kRowsDq / 16][kColsDq / 8][4] = {};
#pragma unroll
    for (int n = 0; n < kBlockN; n += 16) {
      uint32_t fragment_a[kRowsDq / 16][4];
#pragma unroll
      for (int r = 0; r < kRowsDq / 16; ++r) {
        ldmatrix_trans(fragment_a[r],
                       at(smem.sdS[i % kStages], n, row + 16 * r, lane_offset_ds.second));
      }
#pragma unroll
      for (int j = 0; j < kColsDq / 8; j += 2) {
        uint32_t fragment_b[4];
        ldmatrix_trans(fragment_b, at(smem.sK, n, col + 8 * j, lane_offset.first));
#pragma unroll
        for (int r = 0; r < kRowsDq / 16; ++r) {
          mma<Element>(acc_dq[r][j], fragment_a[r], fragment_b[0], fragment_b[1]);
          mma<Element>(acc_dq[r][j + 1], fragment_a[r], fragment_b[2], fragment_b[3]);
        }
      }
    }
    float* target = dq + int64_t(first_row + m_blocks[i] * kBlockM + row) * kPaddedDim +
                    (col / 8 * 32 + lane) * 4;
#pragma unroll
    for (int r = 0; r < kRowsDq / 16; ++r) {
#pragma unroll
      for (int j = 0; j < kColsDq / 8; ++j) {
        reduce_add(target + (r * (kPaddedDim / 8) + j) * 128, acc_dq[r][j]);
      }
    }
  }

  // Writes scale · acc, the 32 rows of this warp, to dK or dV of the head: through `tile`, where nobody else touches
  // these rows any more, for rows of memory are longer than those of fragments.
  __device__ void store(Element* gradient, Element (*tile)[kPaddedDim],
                        const float (&acc)[2][kPaddedDim / 8][4], float scale) const {
    tile += 32 * pair;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kPaddedDim / 8; j += 2) {
        uint32_t fragment[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float* x = &acc[i][j + n / 2][n % 2 * 2];
          fragment[n] = pack<Element>(scale * x[0], scale * x[1]);
        }
        stmatrix(at(tile, 16 * i, 8 * j, lane_offset.first), fragment);
      }
    }
    __syncwarp();  // the rows are complete
#pragma unroll
    for (int n = lane; n < 32 * (kPaddedDim / 8); n += 32) {
      const int row = n / (kPaddedDim / 8), col = n % (kPaddedDim / 8) * 8;
      const int key = n_start + 32 * pair + row;
      if (key >= params.seqlen_k || col >= kHeadDim) continue;
      *reinterpret_cast<uint4*>(gradient + int64_t(key) * kHeadDim + col) =
          *reinterpret_cast<const uint4*>(&tile[row][swizzle<kPaddedDim>(row, col)]);
    }
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

// The P role: S, P and dV.
__device__ void p_role(const Block& block, Element* dv) {
  SharedMemory& smem = block.smem;
  const float scale_log2 = block.params.softmax_scale * kLog2e;
  uint32_t keys[kPaddedDim / 16][2][4];
  if constexpr (kKeysInRegisters) {
    load_keys(keys, smem.sK + 32 * block.pair, block.lane_offset);
  }
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
        lse[0] = block.statistics(smem.lse_log2[i % kStagesQ], 2 * j);
        lse[1] = block.statistics(smem.lse_log2[i % kStagesQ], 2 * j + 1);
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
    // P(i), dS(i - 1) and the tiles dO(i) and Q(i + 1) are complete; P(i - 1), dS(i - 2), dO(i - 1) and Q(i - 1)
    // are not read any more.
    barrier_sync(0, kNumThreads);
    // 5. dV += Pᵀ dO  [32, kPaddedDim]
    add_product_ra(acc_dv, p, smem.sdO[i % kStages], block.lane_offset, [](int) {});
    if (i + 1 < block.m_blocks.count) {
      with_mask(block.is_masked(i + 1), [&](auto is_masked) { make_p(i + 1, is_masked); });
    }
    // 7. dQ_accum += dS K, of the tile before: by then the other warps' keys are there
    if (i > 0) block.add_dq(i - 1, block.pair);
  }
  barrier_sync(0, kNumThreads);  // dS of the last tile is complete
  block.add_dq(block.m_blocks.count - 1, block.pair);
  barrier_sync(0, kNumThreads);  // sK is not read any more
  block.store(dv, smem.sV, acc_dv, 1.0f);
}

// The dS role: dP, dS and dK.
__device__ void ds_role(const Block& block, Element* dk) {
  SharedMemory& smem = block.smem;
  const int warp_dq = kNumPairs + block.pair;
  uint32_t values[kPaddedDim / 16][2][4];
  if constexpr (kKeysInRegisters) {
    load_keys(values, smem.sV + 32 * block.pair, block.lane_offset);
  }

  float acc_dk[2][kPaddedDim / 8][4] = {};
  for (int i = 0; i < block.m_blocks.count; ++i) {
    cp_async_wait<0>();
    barrier_sync(0, kNumThreads);  // as in the P role
    block.copy_dout(i + 1).start_all();
    if (i > 0) block.add_dq(i - 1, warp_dq);

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
      return CrossingP{smem.sP_high[i % kStages][block.pair][j][row][block.lane],
                       smem.sP_low[i % kStages][block.pair][j][row][block.lane]};
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
    if (i + 2 < block.m_blocks.count) block.copy_lse(i + 2);
    if (i + 1 < block.m_blocks.count) block.copy_delta(i + 1);
    cp_async_commit();
  }
  barrier_sync(0, kNumThreads);  // dS of the last tile is complete
  block.add_dq(block.m_blocks.count - 1, warp_dq);
  barrier_sync(0, kNumThreads);  // sK is not read any more
  block.store(dk, smem.sK, acc_dk, block.params.softmax_scale);
}

// Outer K: a block owns kBlockN keys of one head and walks over the queries. The grid has the blocks of keys from
// first_n_block on, as many for each head.
__global__ void __launch_bounds__(kNumThreads, 1)
    backward_kernel(const BackwardParams params, const float* lse_log2, const float* neg_delta,
                    float* dq_accum, int first_n_block) {
  SharedMemory& smem = *dynamic_smem<SharedMemory>();
  // The shuffle tells the compiler that the number is the same in all lanes.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const int blocks_per_head = gridDim.x / (params.batch * params.num_heads);
  const int head_index = blockIdx.x / blocks_per_head;
  const int batch = head_index / params.num_heads, head = head_index % params.num_heads;
  const int64_t split = params.deterministic ? blockIdx.x % blocks_per_head : 0;
  const int n_start = (first_n_block + blockIdx.x % blocks_per_head) * kBlockN;
  const Block block{smem,
                    params,
                    params.q + params.q_strides.offset(batch, head),
                    params.dout + params.dout_strides.offset(batch, head),
                    lse_log2,
                    neg_delta,
                    dq_accum + split * split_elements(params),
                    static_cast<int>(head_index * padded_rows(params)),
                    n_start,
                    QueryTiles(params, n_start),
                    warp % kNumPairs,
                    static_cast<int>(threadIdx.x % 32),
                    {},
                    {}};
  const int64_t first_row = int64_t(head_index) * params.seqlen_k;  // of this head in dk and dv
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
