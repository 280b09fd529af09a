// What the programs of the checker's tests share. A program is a list of cases: a kernel and how it is
// launched. The tests build a program as a library, give a case its memory, and read the checker's report.
//
// They look up line numbers by the markers `// LINE name`.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstring>

#include "common/cuda/launch.h"

// Tensors of the test: x is an input, y an output, scratch has two parts of 32 floats.
struct Memory {
  const float* x;
  float* y;
  float* scratch;  // the first part
  float* second_part;
  int n;         // elements of x
  int turn = 0;  // of the case's launches, counted from 0
};

struct Case {
  const char* name;
  void (*kernel)(Memory);
  int num_blocks, num_threads;
  int smem_bytes = 0;
  int num_zeroed = 0;  // elements of y, by a memset before the launch
  int num_launches = 1;
};

#define CASE(kernel, ...) {#kernel, kernel, __VA_ARGS__}

// Runs the case of this name; returns why it failed, or null.
template <int kNumCases>
const char* run_case(const Case (&cases)[kNumCases], const char* name, Memory memory) {
  for (const Case& c : cases) {
    if (std::strcmp(c.name, name) != 0) continue;
    if (c.num_zeroed > 0) {
      const cudaError_t error = cudaMemsetAsync(memory.y, 0, c.num_zeroed * sizeof(float), nullptr);
      if (error != cudaSuccess) return cudaGetErrorString(error);
    }
    for (memory.turn = 0; memory.turn < c.num_launches; ++memory.turn) {
      const cudaError_t error =
          launch(c.kernel, dim3(c.num_blocks), dim3(c.num_threads), c.smem_bytes, nullptr, memory);
      if (error != cudaSuccess) return launch_error.c_str();
    }
    return nullptr;
  }
  return "there is no case of this name";
}
