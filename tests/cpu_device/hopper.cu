// Needs compute capability 9.0.
//
// Barriers that count arrivals and bytes, tiles copied by TMA, and products of warpgroups: of whole numbers, which
// are exact in whatever order they are added.
#include "common/cuda/tensor_map.h"
#include "common/cuda/wgmma.h"
#include "program.h"

// ---------------------------------------------------------------- mbarriers

// Warps 0 and 1 fill one of two buffers while warps 2 and 3 add up the other. out [64]
__global__ void hand_over(int* out, int num_rounds) {
  struct Shared {
    int numbers[2][64];
    MBarrier full[2], empty[2];
  };
  Shared& shared = *dynamic_smem<Shared>();
  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < 2; ++buffer) {
      mbarrier_init(&shared.full[buffer], 64);
      mbarrier_init(&shared.empty[buffer], 2);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int thread = threadIdx.x % 64;
  int sum = 0;
  for (int round = 0; round < num_rounds; ++round) {
    const int buffer = round % 2, parity = round / 2 % 2;
    if (threadIdx.x < 64) {
      mbarrier_wait(&shared.empty[buffer], parity ^ 1);
      shared.numbers[buffer][thread] = round * 1000 + thread;
      mbarrier_arrive(&shared.full[buffer]);
    } else {
      mbarrier_wait(&shared.full[buffer], parity);
      sum += shared.numbers[buffer][63 - thread];
      __syncwarp();
      if (thread % 32 == 0) mbarrier_arrive(&shared.empty[buffer]);
    }
  }
  if (threadIdx.x >= 64) out[thread] = sum;
}

// ---------------------------------------------------------------- copies

constexpr int kRows = 24;

// The panel that one copy fills. out [kRows, 64]
__global__ void tile(unsigned* out, const __grid_constant__ TensorMap map, int column, int row,
                     int head, int batch) {
  struct Shared {
    alignas(1024) uint16_t panel[kRows * kPanelColumns];
    MBarrier full;
  };
  Shared& shared = *dynamic_smem<Shared>();
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.full, 1);
    mbarrier_init_fence();
    mbarrier_expect(&shared.full, sizeof(shared.panel));
    tma_load(shared.panel, map, &shared.full, column, row, head, batch);
  }
  __syncthreads();
  mbarrier_wait(&shared.full, 0);
  for (int i = threadIdx.x; i < kRows * kPanelColumns; i += blockDim.x) out[i] = shared.panel[i];
}

// Two copies and two phases of one barrier; before the second phase the source changes. out [2, 96]
__global__ void bulk(float* out, float* source) {
  struct Shared {
    alignas(16) float numbers[96];
    MBarrier full;
  };
  Shared& shared = *dynamic_smem<Shared>();
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  for (int phase = 0; phase < 2; ++phase) {
    if (threadIdx.x == 0) {
      mbarrier_expect(&shared.full, sizeof(shared.numbers));
      bulk_load(shared.numbers, source, 32 * sizeof(float), &shared.full);
      bulk_load(shared.numbers + 32, source + 100, 64 * sizeof(float), &shared.full);
    }
    mbarrier_wait(&shared.full, phase);
    for (int i = threadIdx.x; i < 96; i += 32) out[phase * 96 + i] = shared.numbers[95 - i];
    __syncthreads();
    for (int i = threadIdx.x; i < 200; i += 32) source[i] += 1.0f;
    fence_async_proxy();
    __syncthreads();
  }
}

template <typename T>
void run_tiles(const std::string& name) {
  constexpr int kColumns = 72, kNumRows = 40, kHeads = 3, kBatch = 2, kPitch = 80;
  // [batch, row, head, column], so that the rows of a head are far apart.
  std::vector<uint16_t> numbers(kBatch * kNumRows * kHeads * kPitch);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<uint16_t>(random_bits(i));
  DeviceArray<uint16_t> tensor(numbers);
  TensorMap map;
  CHECK(make_tensor_map<T>(&map, "tensor",
                           {tensor.data(), kColumns, kNumRows, kHeads, kBatch, kHeads * kPitch,
                            kPitch, kNumRows * kHeads * kPitch},
                           kRows));
  const auto copy = [&](const char* what, int column, int row, int head, int batch) {
    DeviceArray<unsigned> out(kRows * kPanelColumns);
    run(tile, 1, 64, 4096, out.data(), map, column, row, head, batch);
    print(name + what, out);
  };
  copy(".inside", 0, 8, 1, 1);
  copy(".last_rows", 0, 32, 0, 1);
  copy(".last_columns", 64, 3, 2, 0);
  copy(".nothing", 0, 40, 0, 0);
}

// ---------------------------------------------------------------- products

constexpr int kInner = 64;  // what a product sums over, in four steps

// Element (row, column) of a matrix in panels of `rows` rows, swizzled.
template <typename T>
__device__ T& element(T* panels, int rows, int row, int column) {
  const int chunk = column % 64 / 8 ^ row % 8;
  return panels[column / 64 * rows * 64 + row * 64 + chunk * 8 + column % 8];
}

// a [64, kInner], b [kInner, 2 kRegisters]. The first two steps and the others are two groups, with an accumulator
// each. out [3, kRegisters, 128]: the first after it alone has been waited for, both after all, as registers hold them.
template <typename T, Major kMajorA, Major kMajorB, int kRegisters>
__global__ void multiply(const T* a, const T* b, float* out) {
  constexpr int kColumns = 2 * kRegisters, kPanelBytes = 64 * 128;
  T* shared_a = dynamic_smem<T>();
  T* shared_b = shared_a + 64 * kInner;
  const int thread = threadIdx.x;
  for (int i = thread; i < 64 * kInner; i += 128) {
    const int m = i / kInner, k = i % kInner;
    (kMajorA == Major::k ? element(shared_a, 64, m, k) : element(shared_a, 64, k, m)) = a[i];
  }
  for (int i = thread; i < kInner * kColumns; i += 128) {
    const int k = i / kColumns, n = i % kColumns;
    (kMajorB == Major::k ? element(shared_b, kColumns, n, k) : element(shared_b, 64, k, n)) = b[i];
  }
  fence_async_proxy();
  __syncthreads();
  const SharedMatrix matrix_a = shared_matrix(shared_a, 0);
  const SharedMatrix matrix_b = shared_matrix(shared_b, kPanelBytes);
  float d[2][kRegisters];
  wgmma_fence(d);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    wgmma<T, kMajorA, kMajorB>(d[step / 2], matrix_a, step * (kMajorA == Major::k ? 32 : 2048),
                               matrix_b, step * (kMajorB == Major::k ? 32 : 2048), step % 2 > 0);
    if (step % 2 > 0) wgmma_commit();
  }
  const auto save = [&](int row, const float (&d)[kRegisters]) {
    for (int r = 0; r < kRegisters; ++r) out[(row * kRegisters + r) * 128 + thread] = d[r];
  };
  wgmma_wait<1>(d[0]);
  save(0, d[0]);
  wgmma_wait<0>(d[1]);
  save(1, d[0]);
  save(2, d[1]);
}

// The same with A in registers, added to what is there. out [kRegisters, 128]
template <typename T, Major kMajorB, int kRegisters>
__global__ void multiply_registers(const T* a, const T* b, float* out) {
  constexpr int kColumns = 2 * kRegisters;
  T* shared_b = dynamic_smem<T>();
  const int thread = threadIdx.x;
  for (int i = thread; i < kInner * kColumns; i += 128) {
    const int k = i / kColumns, n = i % kColumns;
    (kMajorB == Major::k ? element(shared_b, kColumns, n, k) : element(shared_b, 64, k, n)) = b[i];
  }
  fence_async_proxy();
  __syncthreads();
  uint32_t fragments[4][4];
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const int m = thread / 32 * 16 + thread % 32 / 4 + n % 2 * 8;
    const int k = n / 4 * 16 + thread % 4 * 2 + n % 4 / 2 * 8;
    fragments[n / 4][n % 4] =
        pack<T>(static_cast<float>(a[m * kInner + k]), static_cast<float>(a[m * kInner + k + 1]));
  }
  const SharedMatrix matrix_b = shared_matrix(shared_b, 64 * 128);
  float d[kRegisters];
#pragma unroll
  for (int r = 0; r < kRegisters; ++r) d[r] = static_cast<float>(thread + r);
  wgmma_fence(d, fragments);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    wgmma<T, kMajorB>(d, fragments[step], matrix_b, step * (kMajorB == Major::k ? 32 : 2048));
  }
  wgmma_commit();
  wgmma_wait<0>(d, fragments);
  for (int r = 0; r < kRegisters; ++r) out[r * 128 + thread] = d[r];
}

// What pending products are worth: nothing. out [32, 128]; poison on the CPU device, and anything on a GPU.
__global__ void pending(float* out) {
  __half* shared = dynamic_smem<__half>();
  for (int i = threadIdx.x; i < 64 * 64; i += 128) shared[i] = __half(1.0f);
  fence_async_proxy();
  __syncthreads();
  float d[32];
  wgmma_fence(d);
  wgmma<__half, Major::k, Major::k>(d, shared_matrix(shared, 0), 0, shared_matrix(shared, 0), 0,
                                    false);
  wgmma_commit();
  for (int r = 0; r < 32; ++r) out[r * 128 + threadIdx.x] = d[r];
  wgmma_wait<0>(d);
}

template <typename T>
void run_products(const std::string& name) {
  const auto numbers = [](int size, uint32_t seed) {
    std::vector<T> values(size);
    for (int i = 0; i < size; ++i) values[i] = T(8.0f * random_eighth(seed + i));
    return values;
  };
  DeviceArray<T> a(numbers(64 * kInner, 0)), b(numbers(kInner * 128, 10000));
  const size_t bytes = (64 + 128) * kInner * sizeof(T);
  const auto multiply_and_print = [&](const char* what, int num_out, auto kernel) {
    DeviceArray<float> out(num_out * 128);
    run(kernel, 1, 128, bytes, a.data(), b.data(), out.data());
    print(name + what, out);
  };
  constexpr Major k = Major::k, m = Major::m;
  multiply_and_print(".k.k.64", 96, multiply<T, k, k, 32>);
  multiply_and_print(".k.m.64", 96, multiply<T, k, m, 32>);
  multiply_and_print(".m.k.64", 96, multiply<T, m, k, 32>);
  multiply_and_print(".m.m.64", 96, multiply<T, m, m, 32>);
  multiply_and_print(".k.k.128", 192, multiply<T, k, k, 64>);
  multiply_and_print(".k.m.128", 192, multiply<T, k, m, 64>);
  multiply_and_print(".m.k.128", 192, multiply<T, m, k, 64>);
  multiply_and_print(".m.m.128", 192, multiply<T, m, m, 64>);
  multiply_and_print(".r.k.64", 32, multiply_registers<T, k, 32>);
  multiply_and_print(".r.m.64", 32, multiply_registers<T, m, 32>);
  multiply_and_print(".r.k.128", 64, multiply_registers<T, k, 64>);
  multiply_and_print(".r.m.128", 64, multiply_registers<T, m, 64>);
}

int main() {
  use_schedule_of_environment();
  for (const int num_rounds : {1, 2, 9}) {
    DeviceArray<int> out(64);
    run(hand_over, 1, 128, 1024, out.data(), num_rounds);
    print("hand_over." + std::to_string(num_rounds), out);
  }
  run_tiles<__half>("tile.f16");
  run_tiles<__nv_bfloat16>("tile.bf16");
  DeviceArray<float> source(random_eighths(200)), copied(192);
  run(bulk, 1, 32, 1024, copied.data(), source.data());
  print("bulk", copied);
  run_products<__half>("product.f16");
  run_products<__nv_bfloat16>("product.bf16");
  DeviceArray<float> out(32 * 128);
  run(pending, 1, 128, 8192, out.data());
  print("pending", out);
}
