// Needs compute capability 8.0.
//
// Additions of four numbers at once, by many threads and blocks.
#include "common/cuda/reduce.h"

#include "program.h"

// Each thread adds to 4 of the `n` sums: thread i to those from 4 (i % (n / 4)) on.
__global__ void add(float* sums, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float x[4];
  for (int j = 0; j < 4; ++j) x[j] = random_eighth(4 * i + j);
  reduce_add(sums + 4 * (i % (n / 4)), x);
}

int main() {
  use_schedule_of_environment();
  for (const int n : {4, 40}) {
    DeviceArray<float> sums(random_eighths(n, 1u << 20));
    run(add, 7, 96, 0, sums.data(), n);
    print("sums." + std::to_string(n), sums);
  }
}
