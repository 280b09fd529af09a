// Every atomic of the CPU device. The results do not depend on the order in which threads arrive: sums are
// exact. Only which thread gets which old value does; those arrays are called `unordered.NAME`.
#include "program.h"

constexpr int kBins = 37, kThreads = 96, kBlocks = 2, kCalls = kThreads * kBlocks;

// Counts in shared memory first, so that global memory sees one addition per block and bin.
__global__ void histogram(const int* input, int n, int* counts) {
  __shared__ int block_counts[kBins];
  for (int bin = threadIdx.x; bin < kBins; bin += blockDim.x) block_counts[bin] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    atomicAdd(&block_counts[input[i]], 1);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < kBins; bin += blockDim.x)
    atomicAdd(&counts[bin], block_counts[bin]);
}

void run_histogram() {
  const int n = 20011;
  std::vector<int> values(n);
  for (int i = 0; i < n; ++i) values[i] = static_cast<int>(random_bits(i) % kBins);
  DeviceArray<int> input(values), counts(std::vector<int>(kBins, 0));
  run(histogram, dim3(7), dim3(128), 0, input.data(), n, counts.data());
  print("histogram", counts);
}

// Multiples of 1/4 whose absolute values add up to less than 64: exact even in bfloat16's 8 digits.
__device__ float quarter(int call) {
  return 0.25f * static_cast<float>(call % 5 - 1);
}

template <typename T>
__global__ void add_quarters(T* target) {
  const int call = blockIdx.x * blockDim.x + threadIdx.x;
  if (call < 150) atomicAdd(target, T(quarter(call)));
}

template <typename T>
__global__ void count_to(T* target, T* old_values) {
  const int call = blockIdx.x * blockDim.x + threadIdx.x;
  old_values[call] = atomicAdd(target, T(1.0f));
}

template <typename T2>
__device__ T2 pair(float x, float y);
template <>
__device__ __half2 pair<__half2>(float x, float y) {
  return __floats2half2_rn(x, y);
}
template <>
__device__ __nv_bfloat162 pair<__nv_bfloat162>(float x, float y) {
  return __floats2bfloat162_rn(x, y);
}

template <typename T2>
__global__ void add_pairs(T2* target) {
  const int call = blockIdx.x * blockDim.x + threadIdx.x;
  if (call < 150) atomicAdd(target, pair<T2>(quarter(call), 0.25f * static_cast<float>(call % 2)));
}

template <typename T>
void run_sums(const std::string& name) {
  DeviceArray<T> sum(std::vector<T>{T(1.0f)}), counter(std::vector<T>{T(0.0f)}), old_values(kCalls);
  run(add_quarters<T>, dim3(kBlocks), dim3(kThreads), 0, sum.data());
  run(count_to<T>, dim3(kBlocks), dim3(kThreads), 0, counter.data(), old_values.data());
  print("add." + name, sum);
  print("count." + name, counter);
  print("unordered.count." + name, old_values);
}

template <typename T, typename T2>
void run_pairs(const std::string& name) {
  DeviceArray<T> sums(std::vector<T>{T(1.0f), T(2.0f)});
  run(add_pairs<T2>, dim3(kBlocks), dim3(kThreads), 0, reinterpret_cast<T2*>(sums.data()));
  print("add." + name, sums);
}

enum Op { kAdd, kSub, kMin, kMax, kAnd, kOr, kXor, kExch, kNumOps };
const char* const kOpNames[kNumOps] = {"add", "sub", "min", "max", "and", "or", "xor", "exch"};

template <typename T>
__global__ void integer_ops(T* targets, T* exch_old_values) {
  const int call = blockIdx.x * blockDim.x + threadIdx.x;
  const T argument = static_cast<T>(random_bits(call));
  atomicAdd(&targets[kAdd], argument);
  atomicSub(&targets[kSub], argument);
  atomicMin(&targets[kMin], argument);
  atomicMax(&targets[kMax], argument);
  atomicAnd(&targets[kAnd], argument | static_cast<T>(0x80f0f000u));
  atomicOr(&targets[kOr], argument & static_cast<T>(0x80010203u));
  atomicXor(&targets[kXor], argument);
  exch_old_values[call] = atomicExch(&targets[kExch], argument);
}

template <typename T>
void run_integer_ops(const std::string& name) {
  const T start = static_cast<T>(0x7fff1234u);
  DeviceArray<T> targets(std::vector<T>(kNumOps, start)), old_values(kCalls);
  run(integer_ops<T>, dim3(kBlocks), dim3(kThreads), 0, targets.data(), old_values.data());
  const std::vector<T> results = targets.to_host();
  for (int op = 0; op < kExch; ++op) {
    print(std::string(kOpNames[op]) + "." + name, std::vector<T>{results[op]});
  }
  // Which value stays is a matter of order; together they are the start and every argument.
  std::vector<T> exchanged = old_values.to_host();
  exchanged.push_back(results[kExch]);
  print("unordered.exch." + name, exchanged);
}

__global__ void wide_ops(unsigned long long* sum, unsigned long long* exch_target,
                         unsigned long long* exch_old, float* float_target, float* float_old) {
  const int call = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(sum, (1ull << 40) + random_bits(call));
  exch_old[call] = atomicExch(exch_target, (1ull << 40) + call);
  float_old[call] = atomicExch(float_target, static_cast<float>(call) + 0.5f);
}

void run_wide_ops() {
  DeviceArray<unsigned long long> sum(std::vector<unsigned long long>{5}),
      target(std::vector<unsigned long long>{7});
  DeviceArray<unsigned long long> old_values(kCalls);
  DeviceArray<float> float_target(std::vector<float>{-1.0f}), float_old(kCalls);
  run(wide_ops, dim3(kBlocks), dim3(kThreads), 0, sum.data(), target.data(), old_values.data(),
      float_target.data(), float_old.data());
  print("add.ull", sum);
  std::vector<unsigned long long> exchanged = old_values.to_host();
  exchanged.push_back(target.to_host()[0]);
  print("unordered.exch.ull", exchanged);
  std::vector<float> float_exchanged = float_old.to_host();
  float_exchanged.push_back(float_target.to_host()[0]);
  print("unordered.exch.float", float_exchanged);
}

__global__ void inc_and_dec(unsigned* targets, unsigned* inc_old, unsigned* dec_old) {
  const int call = blockIdx.x * blockDim.x + threadIdx.x;
  inc_old[call] = atomicInc(&targets[0], 10);
  dec_old[call] = atomicDec(&targets[1], 10);
}

void run_inc_and_dec() {
  // 99 is above the limit: the first atomicInc wraps to 0, the first atomicDec to the limit.
  DeviceArray<unsigned> targets(std::vector<unsigned>{99, 99}), inc_old(kCalls), dec_old(kCalls);
  run(inc_and_dec, dim3(kBlocks), dim3(kThreads), 0, targets.data(), inc_old.data(),
      dec_old.data());
  print("inc_dec", targets);
  print("unordered.inc", inc_old);
  print("unordered.dec", dec_old);
}

// targets[0] *= 3, once per thread, by compare-and-swap; targets[1] stays 5.
template <typename T>
__global__ void triple_by_cas(T* targets, T* saw_five) {
  T old = *static_cast<volatile T*>(targets), expected;
  do {
    expected = old;
    old = atomicCAS(targets, expected, static_cast<T>(expected * 3u));
  } while (old != expected);
  if (atomicCAS(&targets[1], T(2), T(9)) == T(5)) atomicCAS(&saw_five[threadIdx.x], T(0), T(1));
}

template <typename T>
std::vector<unsigned> to_unsigned(const DeviceArray<T>& values) {
  std::vector<unsigned> result;
  for (const T value : values.to_host()) result.push_back(static_cast<unsigned>(value));
  return result;
}

template <typename T>
void run_cas(const std::string& name) {
  DeviceArray<T> targets(std::vector<T>{T(1), T(5)}), saw_five(std::vector<T>(kThreads, T(0)));
  run(triple_by_cas<T>, dim3(kBlocks), dim3(kThreads), 0, targets.data(), saw_five.data());
  print("cas." + name, to_unsigned(targets));
  print("cas_saw_five." + name, to_unsigned(saw_five));
}

int main() {
  use_schedule_of_environment();
  run_histogram();
  run_sums<float>("float");
  run_sums<double>("double");
  run_sums<__half>("half");
  run_sums<__nv_bfloat16>("bfloat16");
  run_pairs<__half, __half2>("half2");
  run_pairs<__nv_bfloat16, __nv_bfloat162>("bfloat162");
  run_integer_ops<int>("int");
  run_integer_ops<unsigned>("unsigned");
  run_wide_ops();
  run_inc_and_dec();
  run_cas<int>("int");
  run_cas<unsigned>("unsigned");
  run_cas<unsigned long long>("ull");
  run_cas<unsigned short>("ushort");
}
