// Shared memory that no thread of the block has written: the CPU device makes every byte 0xff, which is NaN
// in every floating point type. A GPU returns whatever was there, so only the CPU device runs this.
//
// Each kernel first copies what it finds, then leaves values behind for the next block and kernel to find.
#include "program.h"

constexpr int kThreads = 64, kBlocks = 5;

__device__ int global_thread() {
  return blockIdx.x * blockDim.x + threadIdx.x;
}

__global__ void static_float(float* found) {
  __shared__ float shared[kThreads];
  found[global_thread()] = shared[threadIdx.x];
  __syncthreads();
  shared[threadIdx.x] = 1.0f;
}

template <typename T>
__global__ void static_of_template(T* found) {
  __shared__ T shared[kThreads];
  __shared__ T matrix[8][8 + 1];
  found[global_thread()] =
      threadIdx.x % 2 == 0 ? shared[threadIdx.x] : matrix[threadIdx.x / 8][threadIdx.x % 8];
  __syncthreads();
  shared[threadIdx.x] = T(1.0f);
  matrix[threadIdx.x / 8][threadIdx.x % 8] = T(2.0f);
}

namespace {

// Shared memory of a function that the kernel calls.
__device__ float exchange(float value) {
  __shared__ float shared[kThreads];
  const float old = shared[threadIdx.x];
  shared[threadIdx.x] = value;
  return old;
}

__global__ void static_of_function(float* found) {
  found[global_thread()] = exchange(3.0f);
}

}  // namespace

template <typename T>
__global__ void dynamic(T* found) {
  found[global_thread()] = dynamic_smem<T>()[threadIdx.x];
  __syncthreads();
  dynamic_smem<T>()[threadIdx.x] = T(4.0f);
}

// Written elements keep their values, whatever their neighbours are.
__global__ void partly_written(float* found) {
  __shared__ float shared[kThreads];
  float* const more = dynamic_smem<float>();
  if (threadIdx.x % 3 == 0) shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (threadIdx.x % 3 == 1) more[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncthreads();
  found[global_thread()] = threadIdx.x % 2 == 0 ? shared[threadIdx.x] : more[threadIdx.x];
}

// A thread-local variable of a host function is no shared memory.
int num_calls_of_host_function() {
  static thread_local int num_calls = 0;
  return ++num_calls;
}

template <typename T>
void run_twice(const std::string& name, void (*kernel)(T*), size_t smem_bytes) {
  for (int repeat = 0; repeat < 2; ++repeat) {
    DeviceArray<T> found(kBlocks * kThreads);
    run(kernel, dim3(kBlocks), dim3(kThreads), smem_bytes, found.data());
    print(name + "." + std::to_string(repeat), found);
  }
}

int main() {
  use_schedule_of_environment();
  std::vector<int> num_calls{num_calls_of_host_function()};
  run_twice<float>("static_float", static_float, 0);
  num_calls.push_back(num_calls_of_host_function());
  print("num_calls_of_host_function", num_calls);
  run_twice<float>("template_float", static_of_template<float>, 0);
  run_twice<double>("template_double", static_of_template<double>, 0);
  run_twice<__half>("template_half", static_of_template<__half>, 0);
  run_twice<__nv_bfloat16>("template_bfloat16", static_of_template<__nv_bfloat16>, 0);
  run_twice<float>("function", static_of_function, 0);
  run_twice<float>("dynamic_float", dynamic<float>, kThreads * sizeof(float));
  run_twice<__half>("dynamic_half", dynamic<__half>, kThreads * sizeof(__half));
  run_twice<float>("partly_written", partly_written, kThreads * sizeof(float));
}
