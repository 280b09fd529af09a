// Votes, shuffles with sub-masks and widths, divergent warps, barriers that count, threads that return
// early, and the small types and bit functions that kernels use.
#include "program.h"

constexpr int kThreads = 96, kBlocks = 2, kCalls = kThreads * kBlocks;
constexpr unsigned kFullMask = 0xffffffffu;

__device__ int global_thread() {
  return blockIdx.x * blockDim.x + threadIdx.x;
}

// results [8, kCalls]
__global__ void votes(unsigned* results) {
  const int call = global_thread(), lane = threadIdx.x % 32;
  const bool odd = random_bits(call) & 1u;
  results[0 * kCalls + call] = __ballot_sync(kFullMask, odd);
  results[1 * kCalls + call] = __all_sync(kFullMask, call < 64);
  results[2 * kCalls + call] = __all_sync(kFullMask, call != 70);
  results[3 * kCalls + call] = __any_sync(kFullMask, call == 70);
  results[4 * kCalls + call] =
      __match_any_sync(kFullMask, static_cast<int>(random_bits(call) & 7u));
  results[5 * kCalls + call] =
      __match_any_sync(kFullMask, static_cast<unsigned long long>(random_bits(call) & 3u) << 40);
  // Every third lane votes, the others stay away.
  constexpr unsigned kThirds = 0x49249249u;
  unsigned ballot = 0, all = 0;
  if (lane % 3 == 0) {
    ballot = __ballot_sync(kThirds, odd);
    all = __all_sync(kThirds, lane % 3 == 0);
  }
  results[6 * kCalls + call] = ballot;
  results[7 * kCalls + call] = all;
}

// A vote returns the same for any non-zero predicate, 256 and negative ones included.
__global__ void odd_predicates(unsigned* results) {
  const int call = global_thread();
  results[call] = __ballot_sync(kFullMask, (call % 3 - 1) * 256);
}

// results [12, kCalls]: three widths of shfl, shfl_up, shfl_down, shfl_xor
template <typename T>
__global__ void widths(T* results) {
  const int call = global_thread(), lane = threadIdx.x % 32;
  const T value = static_cast<T>(random_bits(call) % 1000u + call * 1000u);
  T* result = results + call;
  for (int width = 8; width <= 32; width *= 2) {
    result[0 * kCalls] =
        __shfl_sync(kFullMask, value, lane * 5 + 3, width);  // the source wraps around
    result[1 * kCalls] = __shfl_up_sync(kFullMask, value, 3, width);
    result[2 * kCalls] = __shfl_down_sync(kFullMask, value, 5, width);
    result[3 * kCalls] = __shfl_xor_sync(kFullMask, value, 9, width);  // crosses segments of 8
    result += 4 * kCalls;
  }
}

// Each half of a warp takes its own branch with its own shuffle; the quarters of the second half vote.
__global__ void half_warps(int* results) {
  const int call = global_thread(), lane = threadIdx.x % 32;
  const int value = call * 3 + 1;
  int result;
  if (lane < 16) {
    result = __shfl_sync(0x0000ffffu, value, 15 - lane, 16);
    result += __shfl_xor_sync(0x0000ffffu, result, 1);
  } else if (lane < 24) {
    result = __shfl_down_sync(0x00ff0000u, value, 2, 8);
    result += __ballot_sync(0x00ff0000u, value & 2) >> 16;
  } else {
    result = __shfl_up_sync(0xff000000u, value, 1, 8);
  }
  __syncwarp();
  results[call] = result + __shfl_sync(kFullMask, result, 31);
}

// The mask is known at run time only: the lanes that hold the same key.
__global__ void masks_of_data(int* results) {
  const int call = global_thread();
  const int key = static_cast<int>(random_bits(call) % 5u);
  const unsigned peers = __match_any_sync(kFullMask, key);
  const int leader = __ffs(static_cast<int>(peers)) - 1;
  results[call] = __shfl_sync(peers, call, leader) * 100 + __popc(peers);
}

__global__ void active_mask(unsigned* results) {
  const int call = global_thread(), lane = threadIdx.x % 32;
  unsigned mask = 0;
  if (lane % 4 == 1) {
    mask = __activemask();
  } else {
    mask = ~__activemask();
  }
  results[call] = mask;
}

// A lane reads what its neighbour wrote to shared memory; only __syncwarp stands between.
__global__ void warp_barriers(int* results) {
  __shared__ int shared[kThreads];
  const int call = global_thread(), lane = threadIdx.x % 32;
  shared[threadIdx.x] = call;
  __syncwarp();
  int result = shared[threadIdx.x ^ 1];
  __syncwarp();
  if (lane >= 16) {
    shared[threadIdx.x] = result * 2;
    __syncwarp(0xffff0000u);
    result = shared[threadIdx.x ^ 5];
  }
  results[call] = result;
}

// results [4, kCalls]
__global__ void block_votes(int* results) {
  const int call = global_thread();
  for (int step = 0; step < 2; ++step) {
    results[0 * kCalls + call] = __syncthreads_count(random_bits(call + step) & 3u);
    results[1 * kCalls + call] = __syncthreads_and(call != 100);
    results[2 * kCalls + call] = __syncthreads_or(call == 100);
    results[3 * kCalls + call] = __syncthreads_and(1) * 10 + __syncthreads_or(0);
  }
}

// Threads past the end return before the shuffles; no barrier follows.
__global__ void early_return(int* results, int n) {
  const int call = global_thread();
  const unsigned mask = __ballot_sync(kFullMask, call < n);
  if (call >= n) return;
  results[call] = __shfl_sync(mask, call, 2) + __popc(mask);
}

// A full mask may name lanes that have returned: CUDA waits for those that have not.
__global__ void returned_lanes(unsigned* results) {
  const int call = global_thread(), lane = threadIdx.x % 32;
  results[call] = 0;
  if (lane % 2 == 1) return;
  results[call] = __ballot_sync(kFullMask, lane != 4);
}

struct Layouts {
  template <typename T>
  __host__ __device__ static int of() {
    return static_cast<int>(sizeof(T) * 100 + alignof(T));
  }
};

__global__ void vector_types(const float4* input, float4* output, int* layouts,
                             unsigned long long* addresses) {
  __shared__ float4 shared[kThreads];
  const int call = global_thread();
  const float4 v = __ldg(&input[call]);
  shared[threadIdx.x] = make_float4(v.w, v.z, v.y, v.x);
  __syncthreads();
  const float4 w = shared[kThreads - 1 - threadIdx.x];
  const float2 low = make_float2(w.x + v.x, w.y + v.y);
  const int4 whole = make_int4(int(v.x * 8), int(v.y * 8), int(v.z * 8), int(v.w * 8));
  const float scalar = __ldg(reinterpret_cast<const float*>(input) + call);
  output[call] = make_float4(low.x, low.y, float(whole.x + whole.y + whole.z + whole.w), scalar);
  addresses[2 * call] = reinterpret_cast<unsigned long long>(shared);
  addresses[2 * call + 1] = reinterpret_cast<unsigned long long>(dynamic_smem<char>());
  if (call > 0) return;
  const int all[] = {
      Layouts::of<char2>(),         Layouts::of<char3>(),   Layouts::of<uchar4>(),
      Layouts::of<short2>(),        Layouts::of<ushort4>(), Layouts::of<int2>(),
      Layouts::of<int3>(),          Layouts::of<int4>(),    Layouts::of<uint2>(),
      Layouts::of<uint4>(),         Layouts::of<float2>(),  Layouts::of<float3>(),
      Layouts::of<float4>(),        Layouts::of<double2>(), Layouts::of<longlong2>(),
      Layouts::of<__half>(),        Layouts::of<__half2>(), Layouts::of<__nv_bfloat16>(),
      Layouts::of<__nv_bfloat162>()};
  for (int layout : all) *layouts++ = layout;
}

// results [10, kCalls]
__global__ void bit_functions(int* results) {
  const int call = global_thread();
  const unsigned bits = random_bits(call) >> (call % 33 == 32 ? 31 : call % 33);
  const float value = random_eighth(call);
  results[0 * kCalls + call] = __popc(bits);
  results[1 * kCalls + call] = __clz(static_cast<int>(bits));
  results[2 * kCalls + call] = __ffs(static_cast<int>(bits << (call % 7)));
  results[3 * kCalls + call] = static_cast<int>(__brev(bits));
  results[4 * kCalls + call] = __float_as_int(value);
  results[5 * kCalls + call] =
      static_cast<int>(__int_as_float(__float_as_int(value) + (1 << 23)) * 8);
  results[6 * kCalls + call] = static_cast<int>(__saturatef(value) * 8);
  results[7 * kCalls + call] = min(call - 50, 7) * 1000 + max(call, 30);
  results[8 * kCalls + call] = __popcll((static_cast<unsigned long long>(bits) << 20) | 1ull);
  // The product needs 48 bits: a multiplication that rounds before the addition loses the low ones.
  const float factor = 1.0f + static_cast<float>(random_bits(call) >> 9) * (1.0f / 8388608.0f);
  results[9 * kCalls + call] = __float_as_int(__fmaf_rn(factor, factor, -1.5f));
}

template <typename T, typename Kernel>
void run_kernel(const std::string& name, Kernel kernel, int rows) {
  DeviceArray<T> results(static_cast<size_t>(rows) * kCalls);
  run(kernel, dim3(kBlocks), dim3(kThreads), 0, results.data());
  print(name, results);
}

void run_early_return(int n) {
  DeviceArray<int> results(std::vector<int>(kCalls, -1));
  run(early_return, dim3(kBlocks), dim3(kThreads), 0, results.data(), n);
  print("early_return_" + std::to_string(n), results);
}

void run_vector_types() {
  const std::vector<float> values = random_eighths(4 * kCalls);
  std::vector<float4> vectors(kCalls);
  memcpy(vectors.data(), values.data(), values.size() * sizeof(float));
  DeviceArray<float4> input(vectors), output(kCalls);
  DeviceArray<int> layouts(19);
  DeviceArray<unsigned long long> addresses(2 * kCalls);
  run(vector_types, dim3(kBlocks), dim3(kThreads), 256, input.data(), output.data(), layouts.data(),
      addresses.data());
  std::vector<float> flat(4 * kCalls);
  memcpy(flat.data(), output.to_host().data(), flat.size() * sizeof(float));
  print("vectors", flat);
  print("layouts", layouts);
  // Taken on the host: a compiler that trusts the declared alignment never looks at the address.
  const std::vector<unsigned long long> all = addresses.to_host();
  int num_misaligned = 0;
  for (int i = 0; i < kCalls; ++i)
    num_misaligned += all[2 * i] % 16 != 0 || all[2 * i + 1] % 1024 != 0;
  print("num_misaligned", std::vector<int>{num_misaligned});
}

int main() {
  use_schedule_of_environment();
  run_kernel<unsigned>("votes", votes, 8);
  run_kernel<unsigned>("odd_predicates", odd_predicates, 1);
  run_kernel<int>("widths.int", widths<int>, 12);
  run_kernel<float>("widths.float", widths<float>, 12);
  run_kernel<double>("widths.double", widths<double>, 12);
  run_kernel<unsigned long long>("widths.ull", widths<unsigned long long>, 12);
  run_kernel<int>("half_warps", half_warps, 1);
  run_kernel<int>("masks_of_data", masks_of_data, 1);
  run_kernel<unsigned>("active_mask", active_mask, 1);
  run_kernel<int>("warp_barriers", warp_barriers, 1);
  run_kernel<int>("block_votes", block_votes, 4);
  run_early_return(0);
  run_early_return(45);
  run_early_return(190);
  run_kernel<unsigned>("returned_lanes", returned_lanes, 1);
  run_vector_types();
  run_kernel<int>("bit_functions", bit_functions, 10);
}
