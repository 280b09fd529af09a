// Which part of the work a block of the grid does, and in which order: a block owns kBlockN keys of a head and
// walks over tiles of kBlockM queries.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/cuda/attention.h"

// Heads whose blocks of keys take turns in the grid. With a causal mask a head's first keys have the most
// queries: all the long blocks of several heads come before all the short ones, so that no long one starts last
// and runs alone; but of no more heads than the L2 cache keeps the dQ accumulators of. Without a mask all blocks
// are equally long, and one head comes after the other.
inline int heads_at_once(const BackwardParams& params, int64_t accumulator_bytes_per_head) {
  constexpr int64_t kBytes =
      8 * 1024 * 1024;  // of 4, 8 and 16 MB the fastest on an H200 at d = 128
  if (!params.is_causal) return 1;
  const int64_t heads = int64_t(params.batch) * params.num_heads;
  const int64_t fitting = kBytes / accumulator_bytes_per_head;
  return static_cast<int>(fitting < 1 ? 1 : fitting < heads ? fitting : heads);
}

// The place of a block in a grid of as many blocks for each of num_heads heads.
struct GridPlace {
  int head;     // of all: batch · num_heads + head
  int n_block;  // of the head's, in this launch

  __device__ GridPlace(int num_heads, int heads_at_once) {
    const int blocks_per_head = gridDim.x / num_heads;
    const int first_head = blockIdx.x / (heads_at_once * blocks_per_head) * heads_at_once;
    const int heads = min(heads_at_once, num_heads - first_head);
    const int i = blockIdx.x - first_head * blocks_per_head;
    head = first_head + i % heads;
    n_block = i / heads;
  }
};

// The tiles of queries that a block of keys visits: from the first one in which some query sees a key; without
// a mask all of them, starting at a place that differs from block to block, so that blocks that run side by
// side add to different parts of dq_accum.
template <int kBlockM>
struct QueryTiles {
  int first, count, num_m_blocks;

  __device__ QueryTiles(const BackwardParams& params, int n_start)
      : num_m_blocks((params.seqlen_q + kBlockM - 1) / kBlockM) {
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
template <int kBlockN>
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
