// Calls a chapter's backward pass from C++, without PyTorch, and compares it with double precision.
//
//   nvcc -std=c++17 -O3 -arch=sm_90a -I. -DFA2_ELEMENT=__nv_bfloat16 -DFA2_HEAD_DIM=64
//        chapters/11_warp_roles/kernel.cu common/standalone/main.cu -o standalone && ./standalone
//
// Whatever chapter, element type and head_dim: a build is for one of each. A program that needs several builds
// each into a library of its own.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "common/cuda/attention.h"
#include "common/cuda/launch_error.h"

namespace {

constexpr int kHeads = 2, kSeqlenQ = 200, kSeqlenK = 300;
constexpr bool kIsCausal = true;

// Stops at the first error, with what the launcher says about it.
void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what,
               launch_error.empty() ? cudaGetErrorString(error) : launch_error.c_str());
  std::exit(1);
}

// A dense [kHeads, rows, kHeadDim] tensor, on the host in double and on the device.
struct Tensor {
  int rows;
  std::vector<double> values;
  Element* device = nullptr;

  Tensor(int rows, double mean, std::mt19937& random)
      : rows(rows), values(size_t(kHeads) * rows * kHeadDim) {
    std::normal_distribution<float> normal(static_cast<float>(mean), 1.0f);
    for (double& x : values) x = normal(random);
    upload();
  }
  // As the device rounds them, so that the comparison is of the arithmetic alone.
  void upload() {
    std::vector<Element> rounded(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      rounded[i] = from_float<Element>(static_cast<float>(values[i]));
      values[i] = to_float(rounded[i]);
    }
    const size_t bytes = rounded.size() * sizeof(Element);
    if (device == nullptr) check(cudaMalloc(&device, bytes), "cudaMalloc");
    check(cudaMemcpy(device, rounded.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  std::vector<double> download() const {
    std::vector<Element> rounded(values.size());
    check(cudaMemcpy(rounded.data(), device, rounded.size() * sizeof(Element),
                     cudaMemcpyDeviceToHost),
          "cudaMemcpy");
    return std::vector<double>(rounded.begin(), rounded.end());
  }
  double* row(int head, int i) { return &values[(size_t(head) * rows + i) * kHeadDim]; }
  TensorStrides strides() const {
    return {int64_t(kHeads) * rows * kHeadDim, int64_t(rows) * kHeadDim, kHeadDim};
  }
};

double dot(const double* x, const double* y) {
  double sum = 0;
  for (int i = 0; i < kHeadDim; ++i) sum += x[i] * y[i];
  return sum;
}

void add(double* target, double factor, const double* x) {
  for (int i = 0; i < kHeadDim; ++i) target[i] += factor * x[i];
}

double relative_error(const std::vector<double>& result, const std::vector<double>& expected) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < result.size(); ++i) {
    difference += (result[i] - expected[i]) * (result[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace

int main() {
  std::mt19937 random(0);
  Tensor q(kSeqlenQ, 0, random), k(kSeqlenK, 0, random), v(kSeqlenK, 0, random);
  Tensor dout(kSeqlenQ, 0.25, random), out(kSeqlenQ, 0, random);
  Tensor dq(kSeqlenQ, 0, random), dk(kSeqlenK, 0, random), dv(kSeqlenK, 0, random);

  BackwardParams params{};
  params.batch = 1;
  params.num_heads = params.num_heads_k = kHeads;
  params.seqlen_q = kSeqlenQ;
  params.seqlen_k = kSeqlenK;
  params.softmax_scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
  params.is_causal = kIsCausal;

  // Forward in double: out and lse, then the gradients from the same P.
  std::vector<double> expected_dq(dq.values.size()), expected_dk(dk.values.size()),
      expected_dv(dv.values.size());
  std::vector<float> lse(size_t(kHeads) * kSeqlenQ);
  for (int head = 0; head < kHeads; ++head) {
    for (int i = 0; i < kSeqlenQ; ++i) {
      const int num_keys = params.num_visible_keys(i);
      std::vector<double> p(num_keys);
      double sum = 0;
      for (int j = 0; j < num_keys; ++j) {
        p[j] = std::exp(params.softmax_scale * dot(q.row(head, i), k.row(head, j)));
        sum += p[j];
      }
      lse[size_t(head) * kSeqlenQ + i] = static_cast<float>(std::log(sum));
      double* o = out.row(head, i);
      for (int x = 0; x < kHeadDim; ++x) o[x] = 0;
      for (int j = 0; j < num_keys; ++j) add(o, p[j] /= sum, v.row(head, j));
      const double delta = dot(o, dout.row(head, i));
      for (int j = 0; j < num_keys; ++j) {
        const double ds =
            params.softmax_scale * p[j] * (dot(dout.row(head, i), v.row(head, j)) - delta);
        const size_t key = (size_t(head) * kSeqlenK + j) * kHeadDim;
        add(&expected_dv[key], p[j], dout.row(head, i));
        add(&expected_dk[key], ds, q.row(head, i));
        add(&expected_dq[(size_t(head) * kSeqlenQ + i) * kHeadDim], ds, k.row(head, j));
      }
    }
  }
  out.upload();
  float* device_lse = nullptr;
  check(cudaMalloc(&device_lse, lse.size() * sizeof(float)), "cudaMalloc");
  check(cudaMemcpy(device_lse, lse.data(), lse.size() * sizeof(float), cudaMemcpyHostToDevice),
        "cudaMemcpy");

  params.q = q.device, params.q_strides = q.strides();
  params.k = k.device, params.k_strides = k.strides();
  params.v = v.device, params.v_strides = v.strides();
  params.out = out.device, params.out_strides = out.strides();
  params.dout = dout.device, params.dout_strides = dout.strides();
  params.lse = device_lse;
  params.dq = dq.device, params.dk = dk.device, params.dv = dv.device;

  WorkspaceLayout layout;
  describe_workspace(params, layout);
  void* workspace = nullptr;
  check(cudaMalloc(&workspace, size_t(layout.total_bytes())), "cudaMalloc");
  check(launch_backward(params, workspace, nullptr), "launch_backward");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");

  const double errors[] = {relative_error(dq.download(), expected_dq),
                           relative_error(dk.download(), expected_dk),
                           relative_error(dv.download(), expected_dv)};
  std::printf("relative errors: dq %.1e, dk %.1e, dv %.1e\n", errors[0], errors[1], errors[2]);
  // bf16 rounds by up to 2^-9, fp16 by 2^-12; P and dS are rounded, and so is the result.
  const double limit = sizeof(Element) == 4 ? 1e-5 : 1e-2;
  for (const double error : errors) {
    if (!(error < limit)) return 1;
  }
  return 0;
}
