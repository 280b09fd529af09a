// 01_naive: the backward pass with every intermediate matrix stored in global memory.
//
//   S = softmax_scale · Q Kᵀ    P = exp(S - lse)    dV = Pᵀ dO     dP = dO Vᵀ
//   dS = P ∘ (dP - delta)       dK = softmax_scale · dSᵀ Q         dQ = softmax_scale · dS K
//
// delta = rowsum(P ∘ dP) is the definition that comes out of the softmax Jacobian (book §16.1): with P and
// dP stored whole, a row sum is one pass over them.
//
// One kernel launch per line of algebra, one thread per element of its result. Nothing is kept on chip:
// the four matrices S, P, dP and dS make O(N²) memory and O(N²) traffic.
//
// Grid: (batch · num_heads, blocks of 128 elements); dS takes one block per row.
#include "common/cuda/attention.h"
#include "common/cuda/launch.h"

namespace {

constexpr int kNumThreads = 128;

// A matrix of one head: rows of kHeadDim elements.
struct Matrix {
  const Element* data;
  TensorStrides strides;

  __device__ const Element* head(int batch, int head) const {
    return data + strides.offset(batch, head);
  }
};

// The first element of an [rows, cols] result that this thread computes, and the step to its next one.
__device__ int64_t first_element() {
  return int64_t(blockIdx.y) * kNumThreads + threadIdx.x;
}
__device__ int64_t element_step() {
  return int64_t(gridDim.y) * kNumThreads;
}

// result = scale · A Bᵀ  [seqlen_q, seqlen_k], with A [seqlen_q, kHeadDim] and B [seqlen_k, kHeadDim]
__global__ void outer_product_kernel(AttentionSizes sizes, Matrix a, Matrix b, float scale,
                                     float* result) {
  const int batch = blockIdx.x / sizes.num_heads, head = blockIdx.x % sizes.num_heads;
  const int64_t num_elements = int64_t(sizes.seqlen_q) * sizes.seqlen_k;
  for (int64_t i = first_element(); i < num_elements; i += element_step()) {
    const Element* row = a.head(batch, head) + i / sizes.seqlen_k * a.strides.row;
    const Element* col = b.head(batch, head) + i % sizes.seqlen_k * b.strides.row;
    float sum = 0.0f;
    for (int x = 0; x < kHeadDim; ++x) sum += to_float(row[x]) * to_float(col[x]);
    result[blockIdx.x * num_elements + i] = scale * sum;
  }
}

// P = exp(S - lse), 0 where the mask hides the key
__global__ void probabilities_kernel(AttentionSizes sizes, const float* s, const float* lse,
                                     float* p) {
  const int64_t num_elements = int64_t(sizes.seqlen_q) * sizes.seqlen_k;
  for (int64_t i = first_element(); i < num_elements; i += element_step()) {
    const int row = static_cast<int>(i / sizes.seqlen_k),
              col = static_cast<int>(i % sizes.seqlen_k);
    const bool visible = col < sizes.num_visible_keys(row);
    const float* row_lse = lse + int64_t(blockIdx.x) * sizes.seqlen_q + row;
    p[blockIdx.x * num_elements + i] =
        visible ? expf(s[blockIdx.x * num_elements + i] - *row_lse) : 0.0f;
  }
}

// dS = P ∘ (dP - delta), delta = rowsum(P ∘ dP); a block takes whole rows
__global__ void ds_kernel(AttentionSizes sizes, const float* p, const float* dp, float* ds) {
  __shared__ float partial[kNumThreads];
  for (int row = blockIdx.y; row < sizes.seqlen_q; row += gridDim.y) {
    const int64_t start = (int64_t(blockIdx.x) * sizes.seqlen_q + row) * sizes.seqlen_k;
    const int num_keys = sizes.num_visible_keys(row);
    float sum = 0.0f;
    for (int col = threadIdx.x; col < num_keys; col += kNumThreads) {
      sum += p[start + col] * dp[start + col];
    }
    __syncthreads();  // partial[0] is still read for the previous row
    partial[threadIdx.x] = sum;
    for (unsigned width = kNumThreads / 2; width > 0; width /= 2) {
      __syncthreads();  // the partial sums so far are complete
      if (threadIdx.x < width) partial[threadIdx.x] += partial[threadIdx.x + width];
    }
    __syncthreads();  // partial[0] is complete
    const float delta = partial[0];
    for (int col = threadIdx.x; col < sizes.seqlen_k; col += kNumThreads) {
      ds[start + col] = col < num_keys ? p[start + col] * (dp[start + col] - delta) : 0.0f;
    }
  }
}

// result = scale · A X   [seqlen_q, kHeadDim], with A [seqlen_q, seqlen_k] and X [seqlen_k, kHeadDim], or
// result = scale · Aᵀ X  [seqlen_k, kHeadDim], with X [seqlen_q, kHeadDim]
template <bool kTransposeA>
__global__ void product_kernel(AttentionSizes sizes, const float* a, Matrix x, float scale,
                               Element* result) {
  const int batch = blockIdx.x / sizes.num_heads, head = blockIdx.x % sizes.num_heads;
  const int num_rows = kTransposeA ? sizes.seqlen_k : sizes.seqlen_q;
  const int num_terms = kTransposeA ? sizes.seqlen_q : sizes.seqlen_k;
  const int64_t row_stride = kTransposeA ? 1 : sizes.seqlen_k;
  const int64_t term_stride = kTransposeA ? sizes.seqlen_k : 1;
  const float* a_head = a + int64_t(blockIdx.x) * sizes.seqlen_q * sizes.seqlen_k;
  const int64_t num_elements = int64_t(num_rows) * kHeadDim;
  for (int64_t i = first_element(); i < num_elements; i += element_step()) {
    const float* a_row = a_head + i / kHeadDim * row_stride;
    const Element* x_col = x.head(batch, head) + i % kHeadDim;
    float sum = 0.0f;
    for (int t = 0; t < num_terms; ++t) {
      sum += a_row[t * term_stride] * to_float(x_col[t * x.strides.row]);
    }
    result[blockIdx.x * num_elements + i] = from_float<Element>(scale * sum);
  }
}

}  // namespace

void describe_workspace(const BackwardParams& params, WorkspaceLayout& layout) {
  for (const char* name : {"s", "p", "dp", "ds"}) {
    layout.add<float>(name, {params.batch, params.num_heads, params.seqlen_q, params.seqlen_k});
  }
}

cudaError_t launch_backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  WorkspaceLayout layout;
  describe_workspace(params, layout);
  float* s = layout.find<float>(workspace, "s");
  float* p = layout.find<float>(workspace, "p");
  float* dp = layout.find<float>(workspace, "dp");
  float* ds = layout.find<float>(workspace, "ds");
  const AttentionSizes& sizes = params;
  const Matrix q{params.q, params.q_strides}, k{params.k, params.k_strides};
  const Matrix v{params.v, params.v_strides}, dout{params.dout, params.dout_strides};
  const float scale = params.softmax_scale;

  const auto blocks = [&](int64_t num_elements) {
    return head_grid(params, (num_elements + kNumThreads - 1) / kNumThreads);
  };
  const dim3 nn_grid = blocks(int64_t(params.seqlen_q) * params.seqlen_k);
  const dim3 q_grid = blocks(int64_t(params.seqlen_q) * kHeadDim);
  const dim3 k_grid = blocks(int64_t(params.seqlen_k) * kHeadDim);
  const dim3 row_grid = head_grid(params, params.seqlen_q);
  const auto run = [&](auto kernel, dim3 grid, auto... arguments) {
    return launch(kernel, grid, dim3(kNumThreads), 0, stream, arguments...);
  };

  // 1. S = softmax_scale · Q Kᵀ
  cudaError_t error = run(outer_product_kernel, nn_grid, sizes, q, k, scale, s);
  // 2. P = exp(S - lse)
  if (error == cudaSuccess) error = run(probabilities_kernel, nn_grid, sizes, s, params.lse, p);
  // 3. dP = dO Vᵀ
  if (error == cudaSuccess) error = run(outer_product_kernel, nn_grid, sizes, dout, v, 1.0f, dp);
  // 4. dS = P ∘ (dP - delta)
  if (error == cudaSuccess) error = run(ds_kernel, row_grid, sizes, p, dp, ds);
  // 5. dV = Pᵀ dO
  if (error == cudaSuccess)
    error = run(product_kernel<true>, k_grid, sizes, p, dout, 1.0f, params.dv);
  // 6. dK = softmax_scale · dSᵀ Q
  if (error == cudaSuccess)
    error = run(product_kernel<true>, k_grid, sizes, ds, q, scale, params.dk);
  // 7. dQ = softmax_scale · dS K
  if (error == cudaSuccess)
    error = run(product_kernel<false>, q_grid, sizes, ds, k, scale, params.dq);
  return error;
}
