// Needs compute capability 8.0.
//
// Tensor core operations: matrices of rows that lie anywhere in shared memory, products of small and of random
// numbers, and the conversions around them.
#include "common/cuda/tensor_core.h"

#include "program.h"

constexpr int kNumRows = 48,
              kStride = 24;  // of 16-bit numbers; rows of a matrix are 48 bytes apart, or more
constexpr int kWarps = 3;

// Where the row that `lane` has an address of begins: a multiple of 8 numbers, no order to be seen.
__device__ int start_of_row(int lane) {
  return (lane * 7 + 5) % kNumRows * kStride + lane % 3 * 8;
}

__device__ uint16_t* fill_shared(uint32_t seed) {
  uint16_t* numbers = dynamic_smem<uint16_t>();
  for (int i = threadIdx.x; i < kNumRows * kStride; i += blockDim.x) {
    numbers[i] = static_cast<uint16_t>(random_bits(seed + i));
  }
  __syncthreads();
  return numbers;
}

// out [kCount, 32]
template <int kCount, bool kTransposed>
__global__ void load(uint32_t* out) {
  const uint16_t* numbers = fill_shared(0);
  const int lane = threadIdx.x;
  // Lanes without a row give an address that must not be read.
  const uint16_t* row = lane < 8 * kCount ? numbers + start_of_row(lane) : numbers;
  uint32_t r[kCount];
  if constexpr (kTransposed) {
    ldmatrix_trans<kCount>(r, row);
  } else {
    ldmatrix<kCount>(r, row);
  }
  for (int i = 0; i < kCount; ++i) out[i * 32 + lane] = r[i];
}

// out [kNumRows * kStride]: shared memory after the store
template <int kCount>
__global__ void store(uint32_t* out) {
  uint16_t* numbers = fill_shared(0);
  const int lane = threadIdx.x;
  uint32_t r[kCount];
  for (int i = 0; i < kCount; ++i) r[i] = random_bits(5000 + i * 32 + lane);
  stmatrix<kCount>(lane < 8 * kCount ? numbers + start_of_row(lane) : numbers, r);
  __syncthreads();
  for (int i = lane; i < kNumRows * kStride; i += 32) out[i] = numbers[i];
}

// Each warp of each block multiplies matrices of its own: a [16, 16], b [16, 8], c [16, 8], c += 2 a b.
template <typename T>
__global__ void multiply(const T* a, const T* b, float* c) {
  const int product = blockIdx.x * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  a += product * 256;
  b += product * 128;
  c += product * 128;
  const auto pair = [](T x, T y) { return pack<T>(static_cast<float>(x), static_cast<float>(y)); };
  uint32_t fragment_a[4];
  for (int i = 0; i < 4; ++i) {
    const T* source = a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;
    fragment_a[i] = pair(source[0], source[1]);
  }
  const uint32_t b0 = pair(b[2 * t * 8 + g], b[(2 * t + 1) * 8 + g]);
  const uint32_t b1 = pair(b[(2 * t + 8) * 8 + g], b[(2 * t + 9) * 8 + g]);
  float sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  for (int repeat = 0; repeat < 2; ++repeat) mma<T>(sum, fragment_a, b0, b1);
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i];
}

// out [n]: x and y rounded; back [2, n]
template <typename T>
__global__ void convert(const float* x, const float* y, uint32_t* out, float* back, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    out[i] = pack<T>(x[i], y[i]);
    const float2 pair = unpack<T>(out[i]);
    back[i] = pair.x;
    back[n + i] = pair.y;
  }
}

__global__ void exponentials(const float* x, float* out, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = fast_exp2(x[i]);
}

template <typename T>
void run_multiply(const std::string& name, bool is_random) {
  constexpr int kNum = 4 * kWarps;
  const auto numbers = [=](int n, uint32_t seed) {
    std::vector<float> values(n);
    for (int i = 0; i < n; ++i) {
      const uint32_t bits = random_bits(seed + i);
      const float small = static_cast<float>(static_cast<int>(bits % 17) - 8);
      values[i] = is_random ? static_cast<float>(bits >> 8) / (1 << 23) - 1.0f : small;
    }
    return values;
  };
  const std::vector<float> a = numbers(kNum * 256, 0), b = numbers(kNum * 128, 10000);
  DeviceArray<T> device_a(std::vector<T>(a.begin(), a.end())),
      device_b(std::vector<T>(b.begin(), b.end()));
  DeviceArray<float> c(numbers(kNum * 128, 20000));
  run(multiply<T>, kNum / kWarps, 32 * kWarps, 0, device_a.data(), device_b.data(), c.data());
  print(name, c);
}

template <typename T>
void run_convert(const std::string& name, const std::vector<float>& x) {
  const std::vector<float> y(x.rbegin(), x.rend());
  const int n = static_cast<int>(x.size());
  DeviceArray<float> device_x(x), device_y(y), back(2 * n);
  DeviceArray<uint32_t> out(n);
  run(convert<T>, 1, 64, 0, device_x.data(), device_y.data(), out.data(), back.data(), n);
  print(name + ".bits", out);
  print(name + ".back", back);
}

template <int kCount>
void run_matrices() {
  const std::string count = std::to_string(kCount);
  const size_t bytes = kNumRows * kStride * 2;
  DeviceArray<uint32_t> loaded(32 * kCount), transposed(32 * kCount), stored(kNumRows * kStride);
  run(load<kCount, false>, 1, 32, bytes, loaded.data());
  run(load<kCount, true>, 1, 32, bytes, transposed.data());
  run(store<kCount>, 1, 32, bytes, stored.data());
  print("load." + count, loaded);
  print("load_trans." + count, transposed);
  print("store." + count, stored);
}

// Reads the bits of fp32 numbers for pack() and fast_exp2(), in hexadecimal, from two lines.
std::vector<float> read_floats() {
  size_t n = 0;
  if (std::scanf("%zu", &n) != 1) std::exit(1);
  std::vector<float> values(n);
  for (float& value : values) {
    uint32_t bits = 0;
    if (std::scanf("%x", &bits) != 1) std::exit(1);
    std::memcpy(&value, &bits, sizeof(value));
  }
  return values;
}

int main() {
  use_schedule_of_environment();
  run_matrices<1>();
  run_matrices<2>();
  run_matrices<4>();
  for (const bool is_random : {false, true}) {
    const std::string kind = is_random ? "random" : "integers";
    run_multiply<__half>("mma." + kind + ".half", is_random);
    run_multiply<__nv_bfloat16>("mma." + kind + ".bfloat16", is_random);
  }
  const std::vector<float> to_pack = read_floats(), exponents = read_floats();
  run_convert<__half>("pack.half", to_pack);
  run_convert<__nv_bfloat16>("pack.bfloat16", to_pack);
  const int n = static_cast<int>(exponents.size());
  DeviceArray<float> x(exponents), out(n);
  run(exponentials, 1, 64, 0, x.data(), out.data(), n);
  print("exp2", out);
}
