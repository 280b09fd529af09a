// Needs compute capability 8.0.
//
// Named barriers: whole blocks that meet at different lines, pairs of warps, producers and consumers that
// hand a buffer to and fro.
#include "common/cuda/barrier.h"

#include "program.h"

constexpr int kThreads = 128;

// out [blocks, kThreads]: neighbours' numbers, exchanged at barriers of the whole block that each half of it
// calls from a line of its own.
__global__ void whole_block(int* out, int id) {
  int* numbers = dynamic_smem<int>();
  const int thread = threadIdx.x;
  int value = thread;
  for (int repeat = 0; repeat < 5; ++repeat) {
    numbers[thread] = value;
    if (thread < kThreads / 2) {
      barrier_sync(id, kThreads);
    } else {
      barrier_sync(id, kThreads);
    }
    value = numbers[(thread + 37) % kThreads] + 1;
    if (id == 0 && repeat % 2 == 0) {
      __syncthreads();
    } else {
      barrier_sync(id, kThreads);
    }
  }
  out[blockIdx.x * kThreads + thread] = value;
}

// Two pairs of warps, each with a barrier: they go on at their own pace. out [kThreads]
__global__ void pairs_of_warps(int* out) {
  int* numbers = dynamic_smem<int>();
  const int thread = threadIdx.x, pair = thread / 64;
  int value = thread;
  for (int repeat = 0; repeat < 3 + 4 * pair; ++repeat) {
    numbers[thread] = value;
    barrier_sync(1 + pair, 64);
    value = numbers[thread ^ 63] + numbers[thread ^ 32];
    barrier_sync(1 + pair, 64);
  }
  out[thread] = value;
}

// Warps 0 and 1 fill one of two buffers while warps 2 and 3 add up the other. Barriers 2 and 3: a buffer is
// full; 4 and 5: it may be filled again. out [64]
__global__ void ping_pong(int* out, int num_rounds) {
  int* numbers = dynamic_smem<int>();  // [2, 64]
  const int thread = threadIdx.x % 64;
  if (threadIdx.x < 64) {
    for (int round = 0; round < num_rounds; ++round) {
      const int buffer = round % 2;
      if (round >= 2) barrier_sync(4 + buffer, kThreads);
      numbers[buffer * 64 + thread] = round * 1000 + thread;
      barrier_arrive(2 + buffer, kThreads);
    }
  } else {
    int sum = 0;
    for (int round = 0; round < num_rounds; ++round) {
      const int buffer = round % 2;
      barrier_sync(2 + buffer, kThreads);
      sum += numbers[buffer * 64 + 63 - thread];
      barrier_arrive(4 + buffer, kThreads);  // in the last rounds nobody waits for it
    }
    out[thread] = sum;
  }
}

// Four warps take turns: each waits for the one before. out [num_turns]
__global__ void turns(int* out, int num_turns) {
  int* count = dynamic_smem<int>();
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) *count = 0;
  __syncthreads();
  for (int turn = warp; turn < num_turns; turn += 4) {
    if (turn > 0) barrier_sync(8 + warp, 64);
    if (threadIdx.x % 32 == 0) {
      out[turn] = 10 * *count + warp;
      *count += 1;
    }
    __syncwarp();
    if (turn + 1 < num_turns) barrier_arrive(8 + (warp + 1) % 4, 64);
  }
}

int main() {
  use_schedule_of_environment();
  for (const int id : {0, 15}) {
    DeviceArray<int> out(3 * kThreads);
    run(whole_block, 3, kThreads, kThreads * sizeof(int), out.data(), id);
    print("whole_block." + std::to_string(id), out);
  }
  DeviceArray<int> pairs(kThreads), sums(64), order(22);
  run(pairs_of_warps, 1, kThreads, kThreads * sizeof(int), pairs.data());
  print("pairs_of_warps", pairs);
  run(ping_pong, 1, kThreads, kThreads * sizeof(int), sums.data(), 9);
  print("ping_pong", sums);
  run(turns, 1, kThreads, sizeof(int), order.data(), 22);
  print("turns", order);
}
