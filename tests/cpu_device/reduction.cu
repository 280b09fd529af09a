// A sum in three levels: shuffles within a warp, shared memory within a block, global memory across
// blocks, where the block that finishes last adds up the others' sums. Grids and blocks are 3-D.
#include "program.h"

constexpr int kMaxWarps = 32;

// Every lane of the warp calls this; `num_lanes` of them exist.
__device__ float warp_sum(float value, int lane, int num_lanes) {
  const unsigned mask = num_lanes == 32 ? 0xffffffffu : (1u << num_lanes) - 1u;
  for (int delta = 16; delta > 0; delta /= 2) {
    const float other = __shfl_down_sync(mask, value, delta);
    if (lane + delta < num_lanes) value += other;  // lanes past the block's end have no value
  }
  return value;
}

__global__ void sum(const float* input, int n, float* block_sums, unsigned* num_finished,
                    float* total) {
  __shared__ float warp_sums[kMaxWarps];
  __shared__ bool is_last_block;
  const int num_threads = blockDim.x * blockDim.y * blockDim.z;
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int num_blocks = gridDim.x * gridDim.y * gridDim.z;
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int warp = thread / 32, lane = thread % 32;
  const int num_warps = (num_threads + 31) / 32;

  float value = 0.0f;
  for (int i = block * num_threads + thread; i < n; i += num_blocks * num_threads)
    value += input[i];
  value = warp_sum(value, lane, min(32, num_threads - warp * 32));
  if (lane == 0) warp_sums[warp] = value;
  __syncthreads();
  if (thread == 0) {
    float block_sum = 0.0f;
    for (int w = 0; w < num_warps; ++w) block_sum += warp_sums[w];
    block_sums[block] = block_sum;
    __threadfence();  // the sum is visible to whoever sees the counter below
    is_last_block = atomicInc(num_finished, num_blocks - 1) == unsigned(num_blocks - 1);
  }
  __syncthreads();
  if (is_last_block && thread == 0) {
    float grid_sum = 0.0f;
    for (int b = 0; b < num_blocks; ++b) grid_sum += static_cast<volatile float*>(block_sums)[b];
    *total = grid_sum;
  }
}

void run_case(const std::string& name, dim3 grid, dim3 block, int n) {
  DeviceArray<float> input(random_eighths(n)), block_sums(grid.x * grid.y * grid.z), total(1);
  DeviceArray<unsigned> num_finished(std::vector<unsigned>{0});
  run(sum, grid, block, 0, input.data(), n, block_sums.data(), num_finished.data(), total.data());
  print(name + ".block_sums", block_sums);
  print(name + ".total", total);
  print(name + ".num_finished", num_finished);  // atomicInc has wrapped around
}

int main() {
  use_schedule_of_environment();
  run_case("one_warp", dim3(1), dim3(32), 1000);
  run_case("cube", dim3(3, 2, 2), dim3(8, 4, 3), 10007);
  run_case("ragged_warp", dim3(5, 1, 3), dim3(5, 4, 5), 12345);
  run_case("one_thread", dim3(2, 3, 1), dim3(1), 77);
  run_case("full_block", dim3(2, 2, 1), dim3(16, 8, 8), 20001);
  run_case("fewer_elements_than_threads", dim3(2), dim3(64, 2), 3);
}
