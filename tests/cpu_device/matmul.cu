// C = A B with tiles in dynamic shared memory, accumulated in fp32, for three element types; one case
// needs more shared memory than a block gets without asking.
#include "program.h"

constexpr int kTile = 16;

// a [m, k], b [k, n], c [m, n]
template <typename T, int kChunk>
__global__ void matmul(const T* a, const T* b, T* c, int m, int n, int k) {
  T* tile_a = dynamic_smem<T>();        // [kTile, kChunk]
  T* tile_b = tile_a + kTile * kChunk;  // [kChunk, kTile]
  const int row = blockIdx.y * kTile + threadIdx.y, col = blockIdx.x * kTile + threadIdx.x;
  float sum = 0.0f;
  for (int k0 = 0; k0 < k; k0 += kChunk) {
    for (int i = threadIdx.x; i < kChunk; i += kTile) {
      tile_a[threadIdx.y * kChunk + i] = row < m && k0 + i < k ? a[row * k + k0 + i] : T(0.0f);
    }
    for (int i = threadIdx.y; i < kChunk; i += kTile) {
      tile_b[i * kTile + threadIdx.x] = col < n && k0 + i < k ? b[(k0 + i) * n + col] : T(0.0f);
    }
    __syncthreads();
    for (int i = 0; i < kChunk; ++i) {
      sum += static_cast<float>(tile_a[threadIdx.y * kChunk + i]) *
             static_cast<float>(tile_b[i * kTile + threadIdx.x]);
    }
    __syncthreads();  // the next chunk overwrites the tiles
  }
  if (row < m && col < n) c[row * n + col] = T(sum);
}

template <typename T>
std::vector<T> converted(const std::vector<float>& values) {
  return std::vector<T>(values.begin(), values.end());
}

template <typename T, int kChunk>
void run_case(const std::string& name, int m, int n, int k) {
  DeviceArray<T> a(converted<T>(random_eighths(m * k))),
      b(converted<T>(random_eighths(k * n, 1u << 20))), c(m * n);
  const dim3 grid((n + kTile - 1) / kTile, (m + kTile - 1) / kTile);
  run(matmul<T, kChunk>, grid, dim3(kTile, kTile), 2 * kTile * kChunk * sizeof(T), a.data(),
      b.data(), c.data(), m, n, k);
  print(name, c);
}

int main() {
  use_schedule_of_environment();
  run_case<float, 16>("float", 37, 29, 50);
  run_case<float, 512>("float_64KiB", 20, 33, 700);  // 2 * 16 * 512 floats
  run_case<__half, 64>("half", 37, 29, 100);
  run_case<__nv_bfloat16, 32>("bfloat16", 17, 48, 65);
}
