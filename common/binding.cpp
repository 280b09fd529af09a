// The PyTorch operators of a chapter: compiled once for each dtype, and linked to every kernel.cu.
//
// Only PyTorch's stable headers are used: a library built against them loads in any PyTorch from 2.10 on. The
// namespace of the operators is the library's own name, so that the library of an edited kernel can live beside
// the one it replaces. Arguments were checked in Python.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "common/cuda/attention.h"
#include "common/cuda/launch_error.h"

using torch::stable::Tensor;
using torch::stable::detail::StableLibrary;
using torch::stable::detail::StableTorchLibraryInit;

// A chapter may define only one of the two passes; the other pair then resolves to null.
__attribute__((weak)) void describe_workspace(const ForwardParams&, WorkspaceLayout&);
__attribute__((weak)) void describe_workspace(const BackwardParams&, WorkspaceLayout&);
__attribute__((weak)) cudaError_t launch_forward(const ForwardParams&, void*, cudaStream_t);
__attribute__((weak)) cudaError_t launch_backward(const BackwardParams&, void*, cudaStream_t);

extern const char fa2_library_name[];  // common/jit.py writes it beside the kernel

namespace {

TensorStrides strides_of(const Tensor& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

const Element* input(const Tensor& tensor) {
  return static_cast<const Element*>(tensor.data_ptr());
}

Element* output(const Tensor& tensor) {
  return static_cast<Element*>(tensor.data_ptr());
}

float* statistics(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<float*>(tensor->data_ptr()) : nullptr;
}

AttentionSizes sizes_of(const Tensor& q, const Tensor& k, double softmax_scale, bool is_causal) {
  return {static_cast<int>(q.size(0)),
          static_cast<int>(q.size(1)),
          static_cast<int>(k.size(1)),
          static_cast<int>(q.size(2)),
          static_cast<int>(k.size(2)),
          static_cast<float>(softmax_scale),
          is_causal};
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(launch_error.empty() ? cudaGetErrorString(error) : launch_error);
}

std::string passes() {
  return std::string(launch_forward ? "forward " : "") + (launch_backward ? "backward" : "");
}

// One line per part: name, dtype, offset, bytes, then the shape.
std::string workspace(bool backward, int64_t batch, int64_t num_heads, int64_t num_heads_k,
                      int64_t seqlen_q, int64_t seqlen_k, bool is_causal, bool deterministic) {
  const AttentionSizes sizes{static_cast<int>(batch),
                             static_cast<int>(num_heads),
                             static_cast<int>(num_heads_k),
                             static_cast<int>(seqlen_q),
                             static_cast<int>(seqlen_k),
                             1.0f,
                             is_causal};
  WorkspaceLayout layout;
  if (backward) {
    BackwardParams params{};
    static_cast<AttentionSizes&>(params) = sizes;
    params.deterministic = deterministic;
    describe_workspace(params, layout);
  } else {
    ForwardParams params{};
    static_cast<AttentionSizes&>(params) = sizes;
    describe_workspace(params, layout);
  }
  std::string text;
  for (const WorkspacePart& part : layout.parts()) {
    text += part.name + " " + part.dtype + " " + std::to_string(part.offset) + " " +
            std::to_string(part.bytes);
    for (const int64_t extent : part.shape) text += " " + std::to_string(extent);
    text += "\n";
  }
  return text;
}

void forward(const Tensor& q, const Tensor& k, const Tensor& v, Tensor out, Tensor lse,
             std::optional<Tensor> row_max, std::optional<Tensor> row_sum, Tensor workspace,
             double softmax_scale, bool is_causal, int64_t stream) {
  ForwardParams params{};
  static_cast<AttentionSizes&>(params) = sizes_of(q, k, softmax_scale, is_causal);
  params.q = input(q);
  params.k = input(k);
  params.v = input(v);
  params.q_strides = strides_of(q);
  params.k_strides = strides_of(k);
  params.v_strides = strides_of(v);
  params.out = output(out);
  params.lse = static_cast<float*>(lse.data_ptr());
  params.row_max = statistics(row_max);
  params.row_sum = statistics(row_sum);
  check(launch_forward(params, workspace.data_ptr(), reinterpret_cast<cudaStream_t>(stream)));
}

void backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
              const Tensor& dout, const Tensor& lse, Tensor dq, Tensor dk, Tensor dv,
              Tensor workspace, double softmax_scale, bool is_causal, bool deterministic,
              int64_t stream) {
  BackwardParams params{};
  static_cast<AttentionSizes&>(params) = sizes_of(q, k, softmax_scale, is_causal);
  params.q = input(q);
  params.k = input(k);
  params.v = input(v);
  params.out = input(out);
  params.dout = input(dout);
  params.q_strides = strides_of(q);
  params.k_strides = strides_of(k);
  params.v_strides = strides_of(v);
  params.out_strides = strides_of(out);
  params.dout_strides = strides_of(dout);
  params.lse = static_cast<const float*>(lse.data_ptr());
  params.dq = output(dq);
  params.dk = output(dk);
  params.dv = output(dv);
  params.deterministic = deterministic;
  check(launch_backward(params, workspace.data_ptr(), reinterpret_cast<cudaStream_t>(stream)));
}

void define(StableLibrary& m) {
  m.def("passes() -> str");
  m.def(
      "workspace(bool backward, int batch, int num_heads, int num_heads_k, int seqlen_q, "
      "int seqlen_k, bool is_causal, bool deterministic) -> str");
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? row_max, "
      "Tensor(d!)? row_sum, Tensor(e!) workspace, float softmax_scale, bool is_causal, int stream) "
      "-> ()");
  m.def(
      "backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor dout, Tensor lse, Tensor(a!) dq, "
      "Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) workspace, float softmax_scale, bool is_causal, "
      "bool deterministic, int stream) -> ()");
}

void implement(StableLibrary& m) {
  m.impl("passes", TORCH_BOX(&passes));
  m.impl("workspace", TORCH_BOX(&workspace));
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}

// What STABLE_TORCH_LIBRARY and STABLE_TORCH_LIBRARY_IMPL expand to, but that their name is known only later.
const StableTorchLibraryInit definitions(StableLibrary::Kind::DEF, define, fa2_library_name,
                                         nullptr, __FILE__, __LINE__);
const StableTorchLibraryInit implementations(StableLibrary::Kind::IMPL, implement, fa2_library_name,
                                             "CompositeExplicitAutograd", __FILE__, __LINE__);

}  // namespace
