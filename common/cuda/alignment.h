// Chapters that load 16 bytes at once need rows that start at multiples of 16 bytes. PyTorch's binding copies
// what is not laid out so; other callers are told.
#pragma once

#include <cstdint>
#include <string>

#include "common/cuda/attention.h"
#include "common/cuda/launch_error.h"

constexpr int kRowAlignment = 16;

// Whether every row is aligned; if not, launch_error says whose are not.
inline bool rows_are_aligned(const char* name, const Element* data, const TensorStrides& strides) {
  constexpr int64_t kElements = kRowAlignment / sizeof(Element);
  if (reinterpret_cast<uintptr_t>(data) % kRowAlignment == 0 && strides.batch % kElements == 0 &&
      strides.head % kElements == 0 && strides.row % kElements == 0) {
    return true;
  }
  launch_error = std::string(name) + " starts, or has strides, at no multiple of " +
                 std::to_string(kRowAlignment) + " bytes; rows are loaded so many bytes at once";
  return false;
}

inline bool rows_are_aligned(const ForwardParams& params) {
  return rows_are_aligned("q", params.q, params.q_strides) &&
         rows_are_aligned("k", params.k, params.k_strides) &&
         rows_are_aligned("v", params.v, params.v_strides);
}

inline bool rows_are_aligned(const BackwardParams& params) {
  return rows_are_aligned("q", params.q, params.q_strides) &&
         rows_are_aligned("k", params.k, params.k_strides) &&
         rows_are_aligned("v", params.v, params.v_strides) &&
         rows_are_aligned("out", params.out, params.out_strides) &&
         rows_are_aligned("dout", params.dout, params.dout_strides);
}
