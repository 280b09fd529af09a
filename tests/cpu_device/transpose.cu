// A matrix transposed through a 32 x 33 tile of static shared memory, with ragged edges.
#include "program.h"

constexpr int kTile = 32, kRowsPerStep = 8;

// input [rows, cols], output [cols, rows]
__global__ void transpose(const float* input, float* output, int rows, int cols) {
  __shared__ float tile[kTile][kTile + 1];  // the odd pitch spreads a column over all banks
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  for (int i = threadIdx.y; i < kTile; i += kRowsPerStep) {
    const int row = row0 + i, col = col0 + threadIdx.x;
    if (row < rows && col < cols) tile[i][threadIdx.x] = input[row * cols + col];
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kTile; i += kRowsPerStep) {
    const int row = col0 + i, col = row0 + threadIdx.x;
    if (row < cols && col < rows) output[row * rows + col] = tile[threadIdx.x][i];
  }
}

void run_case(int rows, int cols) {
  DeviceArray<float> input(random_eighths(rows * cols)), output(rows * cols);
  const dim3 grid((cols + kTile - 1) / kTile, (rows + kTile - 1) / kTile);
  run(transpose, grid, dim3(kTile, kRowsPerStep), 0, input.data(), output.data(), rows, cols);
  print(std::to_string(rows) + "x" + std::to_string(cols), output);
}

int main() {
  use_schedule_of_environment();
  run_case(64, 32);
  run_case(70, 45);
  run_case(1, 100);
  run_case(33, 31);
}
