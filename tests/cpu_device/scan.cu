// Inclusive prefix sums: shfl_up within a warp, shared memory across the warps of a block, a second
// kernel across blocks.
#include "program.h"

template <typename T>
__device__ T warp_scan(T value, int lane) {
  for (int delta = 1; delta < 32; delta *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, value, delta);
    if (lane >= delta) value += other;
  }
  return value;
}

template <typename T>
__global__ void scan_block(const T* input, T* output, T* block_sums, int n) {
  __shared__ T warp_sums[32];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  T value = warp_scan(i < n ? input[i] : T(0), lane);
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  if (warp == 0) {
    const T sums = warp_scan(lane < num_warps ? warp_sums[lane] : T(0), lane);
    __syncwarp();  // every lane has read warp_sums
    if (lane < num_warps) warp_sums[lane] = sums;
  }
  __syncthreads();
  if (warp > 0) value += warp_sums[warp - 1];
  if (i < n) output[i] = value;
  if (threadIdx.x == blockDim.x - 1) block_sums[blockIdx.x] = value;
}

template <typename T>
__global__ void add_sums_of_earlier_blocks(T* output, const T* block_sums, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  T before = T(0);
  for (int b = 0; b < static_cast<int>(blockIdx.x); ++b) before += block_sums[b];
  output[i] += before;
}

template <typename T>
void run_case(const std::string& name, int block, int n) {
  std::vector<T> values(n);
  for (int i = 0; i < n; ++i) values[i] = T(random_eighth(i) * 8);  // whole numbers
  const int num_blocks = (n + block - 1) / block;
  DeviceArray<T> input(values), output(n), block_sums(num_blocks);
  run(scan_block<T>, dim3(num_blocks), dim3(block), 0, input.data(), output.data(),
      block_sums.data(), n);
  run(add_sums_of_earlier_blocks<T>, dim3(num_blocks), dim3(block), 0, output.data(),
      block_sums.data(), n);
  print(name, output);
}

int main() {
  use_schedule_of_environment();
  run_case<int>("int_5000", 256, 5000);
  run_case<float>("float_3001", 1024, 3001);
  run_case<double>("double_95", 32, 95);
}
