// What the grader calls in a submission, compiled beside it: plain C, so that the process that runs a
// submission needs neither PyTorch nor anything else that could be misused.
#include <cuda_runtime_api.h>

#include <exception>
#include <string>

#include "common/cuda/attention.h"
#include "common/cuda/launch_error.h"

// A submission may define only one of the two passes; the other pair then resolves to null.
__attribute__((weak)) void describe_workspace(const ForwardParams&, WorkspaceLayout&);
__attribute__((weak)) void describe_workspace(const BackwardParams&, WorkspaceLayout&);
__attribute__((weak)) cudaError_t launch_forward(const ForwardParams&, void*, cudaStream_t);
__attribute__((weak)) cudaError_t launch_backward(const BackwardParams&, void*, cudaStream_t);

namespace {

// common/grade/runner.py fills it: batch, num_heads, seqlen_q, seqlen_k; then q, k, v, out, dout, each with
// the strides of its first three axes; then the results.
struct Call {
  int64_t backward, batch, num_heads, seqlen_q, seqlen_k, is_causal, deterministic;
  double softmax_scale;
  void *q, *k, *v, *out, *dout, *lse;
  int64_t strides[5][3];
  void *first, *second, *third, *fourth;  // dq, dk, dv, or out, lse, row_max, row_sum
  void* workspace;
};

std::string text;

AttentionSizes sizes_of(const Call& call) {
  return {int(call.batch),    int(call.num_heads),       int(call.num_heads), int(call.seqlen_q),
          int(call.seqlen_k), float(call.softmax_scale), call.is_causal != 0};
}

TensorStrides strides_of(const Call& call, int i) {
  return {call.strides[i][0], call.strides[i][1], call.strides[i][2]};
}

ForwardParams forward_params(const Call& call) {
  ForwardParams params{};
  static_cast<AttentionSizes&>(params) = sizes_of(call);
  params.q = static_cast<const Element*>(call.q);
  params.k = static_cast<const Element*>(call.k);
  params.v = static_cast<const Element*>(call.v);
  params.q_strides = strides_of(call, 0);
  params.k_strides = strides_of(call, 1);
  params.v_strides = strides_of(call, 2);
  params.out = static_cast<Element*>(call.first);
  params.lse = static_cast<float*>(call.second);
  params.row_max = static_cast<float*>(call.third);
  params.row_sum = static_cast<float*>(call.fourth);
  return params;
}

BackwardParams backward_params(const Call& call) {
  BackwardParams params{};
  static_cast<AttentionSizes&>(params) = sizes_of(call);
  params.q = static_cast<const Element*>(call.q);
  params.k = static_cast<const Element*>(call.k);
  params.v = static_cast<const Element*>(call.v);
  params.out = static_cast<const Element*>(call.out);
  params.dout = static_cast<const Element*>(call.dout);
  params.q_strides = strides_of(call, 0);
  params.k_strides = strides_of(call, 1);
  params.v_strides = strides_of(call, 2);
  params.out_strides = strides_of(call, 3);
  params.dout_strides = strides_of(call, 4);
  params.lse = static_cast<const float*>(call.lse);
  params.dq = static_cast<Element*>(call.first);
  params.dk = static_cast<Element*>(call.second);
  params.dv = static_cast<Element*>(call.third);
  params.deterministic = call.deterministic != 0;
  return params;
}

}  // namespace

extern "C" {

// "forward backward", or one of them.
const char* grade_passes() {
  text = std::string(launch_forward ? "forward " : "") + (launch_backward ? "backward" : "");
  return text.c_str();
}

// One line per part of the scratch memory: name, dtype, offset, bytes, then the shape.
const char* grade_workspace(const Call* call) {
  WorkspaceLayout layout;
  if (call->backward != 0) {
    describe_workspace(backward_params(*call), layout);
  } else {
    describe_workspace(forward_params(*call), layout);
  }
  text.clear();
  for (const WorkspacePart& part : layout.parts()) {
    text += part.name + " " + part.dtype + " " + std::to_string(part.offset) + " " +
            std::to_string(part.bytes);
    for (const int64_t extent : part.shape) text += " " + std::to_string(extent);
    text += "\n";
  }
  return text.c_str();
}

// Runs a pass. Returns what went wrong, or an empty text.
const char* grade_run(const Call* call) {
  text.clear();
  try {
    const cudaError_t error =
        call->backward != 0 ? launch_backward(backward_params(*call), call->workspace, nullptr)
                            : launch_forward(forward_params(*call), call->workspace, nullptr);
    if (error != cudaSuccess)
      text = launch_error.empty() ? cudaGetErrorString(error) : launch_error;
  } catch (const std::exception& error) {
    text = error.what();
  }
  return text.c_str();
}

}  // extern "C"
