// What the test programs share: checked CUDA calls, device arrays, reproducible input, printing.
//
// A program prints each result array as one line `name: value value ...`, which the tests compare with
// values computed independently. On the CPU device the environment variable SCHEDULE picks the order in
// which blocks and threads run (see common/cpu_device/scheduler.h); a GPU ignores it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "common/cuda/launch.h"

// Weak: a build for a GPU has no such function.
extern "C" __attribute__((weak)) void cpu_device_set_schedule(int64_t schedule);

inline void set_schedule(int64_t schedule) {
  if (cpu_device_set_schedule != nullptr) cpu_device_set_schedule(schedule);
}

inline void use_schedule_of_environment() {
  if (const char* text = std::getenv("SCHEDULE")) set_schedule(std::atoll(text));
}

#define CHECK(call) check((call), #call, __FILE__, __LINE__)

inline void check(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s:%d: %s: %s %s\n", file, line, call, cudaGetErrorString(error),
               launch_error.c_str());
  std::exit(1);
}

// Launches and waits; a failure ends the program.
template <typename... Parameters, typename... Arguments>
void run(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t smem_bytes,
         Arguments... arguments) {
  CHECK(launch(kernel, grid, block, smem_bytes, nullptr, arguments...));
  CHECK(cudaDeviceSynchronize());
}

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : size_(values.size()) {
    CHECK(cudaMalloc(&data_, size_ * sizeof(T)));
    CHECK(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  // Every byte 0xa5, so that an element that no thread writes does not pass for a result.
  explicit DeviceArray(size_t size) : size_(size) {
    CHECK(cudaMalloc(&data_, size_ * sizeof(T)));
    CHECK(cudaMemset(data_, 0xa5, size_ * sizeof(T)));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* data() { return data_; }

  std::vector<T> to_host() const {
    std::vector<T> values(size_);
    CHECK(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t size_;
};

// A hash (PCG), so that element i of an input needs no state and Python computes the same.
__host__ __device__ inline uint32_t random_bits(uint32_t i) {
  const uint32_t state = i * 747796405u + 2891336453u;
  const uint32_t word = ((state >> ((state >> 28) + 4u)) ^ state) * 277803737u;
  return (word >> 22) ^ word;
}

// Multiples of 1/8 in [-1, 3): exact in every type of these tests, and their mean is not zero.
__host__ __device__ inline float random_eighth(uint32_t i) {
  return static_cast<float>(random_bits(i) & 31u) * 0.125f - 1.0f;
}

inline std::vector<float> random_eighths(size_t size, uint32_t first = 0) {
  std::vector<float> values(size);
  for (size_t i = 0; i < size; ++i) values[i] = random_eighth(first + static_cast<uint32_t>(i));
  return values;
}

inline void print_value(int v) {
  std::printf(" %d", v);
}
inline void print_value(unsigned v) {
  std::printf(" %u", v);
}
inline void print_value(unsigned long long v) {
  std::printf(" %llu", v);
}
inline void print_value(float v) {
  std::printf(" %.9g", v);
}
inline void print_value(double v) {
  std::printf(" %.17g", v);
}
// 16-bit types as their bits in hexadecimal.
template <typename T>
void print_value(T v) {
  static_assert(sizeof(T) == 2, "no format for this type");
  uint16_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  std::printf(" %04x", bits);
}

template <typename T>
void print(const std::string& name, const std::vector<T>& values) {
  std::printf("%s:", name.c_str());
  for (const T& value : values) print_value(value);
  std::printf("\n");
}

template <typename T>
void print(const std::string& name, const DeviceArray<T>& values) {
  print(name, values.to_host());
}
