// The launch contract: what a chapter's kernel.cu is given and which functions it defines.
//
// Shapes: q, out, dout, dq are [batch, num_heads, seqlen_q, kHeadDim]; k, v, dk, dv are
// [batch, num_heads_k, seqlen_k, kHeadDim]; lse, row_max, row_sum are [batch, num_heads, seqlen_q], fp32.
// Inputs may be strided (the last axis is dense); what a launch writes is dense.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cuda/element.h"
#include "common/cuda/workspace.h"

// Distances in elements, any value, 0 included.
struct TensorStrides {
  int64_t batch, head, row;

  __host__ __device__ int64_t offset(int b, int h) const { return b * batch + h * head; }
};

struct AttentionSizes {
  int batch, num_heads, num_heads_k, seqlen_q, seqlen_k;
  float softmax_scale;
  bool is_causal;

  // Causal masks are aligned bottom-right: the last query sees the last key.
  // Keys [0, num_visible_keys(row)) are the ones that query `row` attends to.
  __host__ __device__ int num_visible_keys(int row) const {
    if (!is_causal) return seqlen_k;
    const int64_t last = int64_t(row) + seqlen_k - seqlen_q;
    return last < 0 ? 0 : last + 1 < seqlen_k ? static_cast<int>(last + 1) : seqlen_k;
  }
};

struct ForwardParams : AttentionSizes {
  const Element *q, *k, *v;
  TensorStrides q_strides, k_strides, v_strides;
  Element* out;
  float* lse;  // natural log of the sum of exp of the scaled scores; -inf where no key is visible
  float* row_max;  // m and l of each row, or nullptr: not wanted
  float* row_sum;
};

struct BackwardParams : AttentionSizes {
  const Element *q, *k, *v, *out, *dout;
  TensorStrides q_strides, k_strides, v_strides, out_strides, dout_strides;
  const float* lse;  // dense
  Element *dq, *dk, *dv;
  bool deterministic;
};

// CUDA's limit of gridDim.y. Tests set a smaller one, or no kernel would stride below millions of rows.
#ifndef FA2_MAX_GRID_Y
#define FA2_MAX_GRID_Y 65535
#endif

// One column of blocks per head: x counts heads, y counts blocks of one head. y is limited, so a kernel
// strides over its blocks: for (block = blockIdx.y; block < num_blocks; block += gridDim.y).
inline dim3 head_grid(const AttentionSizes& sizes, int64_t num_blocks) {
  const int64_t y = num_blocks < FA2_MAX_GRID_Y ? num_blocks : FA2_MAX_GRID_Y;
  return dim3(static_cast<unsigned>(sizes.batch) * sizes.num_heads, static_cast<unsigned>(y));
}

// A chapter defines the first pair, the second pair, or both. `workspace` is uninitialised memory of the
// size the layout asks for. Sizes are never zero. A launcher returns the first error it meets.
void describe_workspace(const ForwardParams& params, WorkspaceLayout& layout);
cudaError_t launch_forward(const ForwardParams& params, void* workspace, cudaStream_t stream);

void describe_workspace(const BackwardParams& params, WorkspaceLayout& layout);
cudaError_t launch_backward(const BackwardParams& params, void* workspace, cudaStream_t stream);
