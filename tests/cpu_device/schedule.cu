// Kernels whose results depend on the order of blocks and threads, run with the schedules named on the
// command line: -2 in parallel, -1 in order, otherwise a seed.
//
// Prints for schedule S, twice: `sum S` (bits of a float sum by atomics), `arrivals S` (threads in order of
// arrival), `shared_arrivals S` (the same within blocks, before and after a barrier). `schedule rendezvous S`
// runs a kernel whose two blocks wait for each other.
#include "program.h"

constexpr int kBlocks = 6, kThreads = 40, kCalls = kBlocks * kThreads;

// Fractions of 24 bits times powers of two from 1 to 4096: every order of adding rounds differently.
__host__ __device__ inline float summand(int call) {
  const float fraction = 1.0f + static_cast<float>(random_bits(call) >> 9) * (1.0f / 8388608.0f);
  return fraction * static_cast<float>(1u << (random_bits(call + 1000) % 13u));
}

__global__ void sum_in_order_of_arrival(float* sum, unsigned* num_arrived, int* arrivals) {
  const int call = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(sum, summand(call));
  arrivals[atomicAdd(num_arrived, 1u)] = call;
}

// arrivals [kBlocks, 2, kThreads]
__global__ void arrive_in_blocks(int* arrivals) {
  __shared__ int num_arrived;
  if (threadIdx.x == 0) num_arrived = 0;
  __syncthreads();
  int* const mine = arrivals + blockIdx.x * 2 * kThreads;
  for (int step = 0; step < 2; ++step) {
    mine[atomicAdd(&num_arrived, 1)] = threadIdx.x;
    __syncthreads();
  }
}

constexpr int kAdditions = 1000000;

// The second block must run while the first does; then both add to the same addresses.
__global__ void rendezvous(int* has_arrived, int* count, float* float_count) {
  atomicExch(&has_arrived[blockIdx.x], 1);
  while (*static_cast<volatile int*>(&has_arrived[1 - blockIdx.x]) == 0) {
  }
  for (int i = 0; i < kAdditions; ++i) atomicAdd(count, 1);
  for (int i = 0; i < kAdditions; ++i) atomicAdd(float_count, 1.0f);
}

void run_rendezvous() {
  DeviceArray<int> has_arrived(std::vector<int>{0, 0}), count(std::vector<int>{0});
  DeviceArray<float> float_count(std::vector<float>{0.0f});
  const cudaError_t error = launch(rendezvous, dim3(2), dim3(1), 0, nullptr, has_arrived.data(),
                                   count.data(), float_count.data());
  std::printf("rendezvous: %s %s\n", cudaGetErrorName(error), launch_error.c_str());
  print("count", count);
  print("float_count", float_count);
}

void run_schedule(const std::string& schedule) {
  set_schedule(std::atoll(schedule.c_str()));
  for (int repeat = 0; repeat < 2; ++repeat) {
    DeviceArray<float> sum(std::vector<float>{0.0f});
    DeviceArray<unsigned> num_arrived(std::vector<unsigned>{0});
    DeviceArray<int> arrivals(kCalls), shared_arrivals(2 * kCalls);
    run(sum_in_order_of_arrival, dim3(kBlocks), dim3(kThreads), 0, sum.data(), num_arrived.data(),
        arrivals.data());
    run(arrive_in_blocks, dim3(kBlocks), dim3(kThreads), 0, shared_arrivals.data());
    uint32_t bits;
    const float value = sum.to_host()[0];
    std::memcpy(&bits, &value, sizeof(bits));
    const std::string suffix = " " + schedule + (repeat == 0 ? "" : " again");
    std::printf("sum%s: %08x\n", suffix.c_str(), bits);
    print("arrivals" + suffix, arrivals);
    print("shared_arrivals" + suffix, shared_arrivals);
  }
}

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "rendezvous") {
    set_schedule(std::atoll(argv[2]));
    run_rendezvous();
    return 0;
  }
  for (int i = 1; i < argc; ++i) run_schedule(argv[i]);
}
