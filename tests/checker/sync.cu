// Barriers and shuffles that some threads do not reach (synccheck), and kernels that fail in other ways. Beside
// each mistake stands a kernel that does the same correctly.
#include "program.h"

// After program.h, as kernels have it.
#include <cassert>

namespace {

constexpr unsigned kFullMask = 0xffffffffu;

// The thread that makes the mistake, in the middle of everything.
__device__ bool is_culprit() {
  return blockIdx.x == 1 && threadIdx.x == 37;
}

__device__ int thread_of_grid() {
  return blockIdx.x * blockDim.x + threadIdx.x;
}

__global__ void barrier_for_all(Memory m) {
  m.y[thread_of_grid()] = 0.0f;
  __syncthreads();
  if (m.n > 0) __syncthreads();
}

// Half of a warp goes to another barrier than the rest.
__global__ void divergent_barrier(Memory m) {
  m.y[thread_of_grid()] = 0.0f;
  if (threadIdx.x < 48) {
    __syncthreads();  // LINE divergent_barrier.one
  } else {
    m.y[thread_of_grid()] = 1.0f;
    __syncthreads();  // LINE divergent_barrier.other
  }
}

__global__ void early_return(Memory m) {
  m.y[thread_of_grid()] = 0.0f;
  if (is_culprit()) return;
  __syncthreads();  // LINE early_return
}

__global__ void return_after_barrier(Memory m) {
  m.y[thread_of_grid()] = 0.0f;
  __syncthreads();
  if (is_culprit()) return;
  __syncwarp();
}

__global__ void different_kinds_of_barrier(Memory m) {
  m.y[thread_of_grid()] = 0.0f;
  if (threadIdx.x % 2 == 0) {
    m.y[thread_of_grid()] = float(__syncthreads_or(1));  // LINE different_kinds_of_barrier.or
  } else {
    m.y[thread_of_grid()] = float(__syncthreads_and(1));  // LINE different_kinds_of_barrier.and
  }
}

// The mask names one half of the warp, the source is in the other.
__global__ void absent_lane(Memory m) {
  const bool is_first_half = threadIdx.x % 32 < 16;
  const unsigned mask = is_first_half ? 0x0000ffffu : 0xffff0000u;
  const int source = is_culprit() || !is_first_half ? 20 : 3;
  m.y[thread_of_grid()] = __shfl_sync(mask, 1.0f, source);  // LINE absent_lane
}

__global__ void lanes_of_one_half(Memory m) {
  const unsigned mask = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
  m.y[thread_of_grid()] = __shfl_xor_sync(mask, float(threadIdx.x), 15);
}

// A shuffle down past the warp's end returns a lane's own value: no mistake.
__global__ void shuffle_past_the_end(Memory m) {
  float sum = m.x[threadIdx.x];
  for (int delta = 16; delta > 0; delta /= 2) sum += __shfl_down_sync(kFullMask, sum, delta);
  m.y[thread_of_grid()] = sum;
}

__global__ void returned_lane(Memory m) {
  m.y[thread_of_grid()] = 0.0f;
  if (threadIdx.x == 40) return;
  const int source = is_culprit() ? 8 : threadIdx.x % 32 == 8 ? 7 : int(threadIdx.x % 32);
  m.y[thread_of_grid()] = __shfl_sync(kFullMask, 1.0f, source);  // LINE returned_lane
}

__global__ void foreign_mask(Memory m) {
  m.y[thread_of_grid()] = 0.0f;
  const unsigned mask = is_culprit() ? 0xffffff0fu : kFullMask;
  __syncwarp(mask);  // LINE foreign_mask
}

// Lanes 0 to 15 wait for the others, which wait at the barrier.
__global__ void deadlock(Memory m) {
  m.y[thread_of_grid()] = 0.0f;
  if (blockIdx.x == 1 && threadIdx.x < 16) {
    __syncwarp(kFullMask);  // LINE deadlock.syncwarp
  }
  __syncthreads();  // LINE deadlock.barrier
}

__global__ void failed_assert(Memory m) {
  m.y[thread_of_grid()] = 0.0f;
  assert(!is_culprit() || m.n < 0);  // LINE failed_assert
}

__global__ void trap(Memory m) {
  m.y[thread_of_grid()] = 0.0f;
  if (is_culprit()) __trap();  // LINE trap
}

__global__ void division_by_zero(Memory m) {
  const int divisor = is_culprit() ? m.turn : 3;
  m.y[thread_of_grid()] = float(m.n / divisor);  // LINE division_by_zero
}

// Only looks at memory, so that the checker is what the time limit finds at work.
__global__ void endless_reads(Memory m) {
  m.y[thread_of_grid()] = 0.0f;
  const volatile float* x = m.x;  // or the loop, which does nothing, may be left out
  while (is_culprit() && x[threadIdx.x % 32] != -1.0f) {
  }
}

// One more mistake each time around.
__global__ void endless_mistakes(Memory m) {
  m.y[thread_of_grid()] = 0.0f;
  while (is_culprit() && m.x[0] != -1.0f) m.y[-1] = 0.0f;
}

__global__ void endless_arithmetic(Memory m) {
  m.y[thread_of_grid()] = 0.0f;
  volatile unsigned value = m.n;
  while (is_culprit() && value != 0) value = value * 2 + 1;
  m.y[thread_of_grid()] = float(value);
}

__global__ void endless_barriers(Memory m) {
  m.y[thread_of_grid()] = 0.0f;
  while (blockIdx.x == 1 && m.n > 0) __syncthreads();
}

__device__ int depth_of(int n, volatile int* place) {  // LINE recursion
  volatile int local[64];
  local[n % 64] = *place;
  return n < 0 ? 0 : depth_of(n + 1, local + n % 64) + local[(n + 1) % 64];
}

__global__ void recursion(Memory m) {
  volatile int start = m.n;
  m.y[thread_of_grid()] = is_culprit() ? float(depth_of(start, &start)) : 0.0f;
}

const Case kCases[] = {
    CASE(barrier_for_all, 2, 64),
    CASE(divergent_barrier, 2, 64),
    CASE(early_return, 2, 64),
    CASE(return_after_barrier, 2, 64),
    CASE(different_kinds_of_barrier, 2, 64),
    CASE(absent_lane, 2, 64),
    CASE(lanes_of_one_half, 2, 64),
    CASE(shuffle_past_the_end, 2, 64),
    CASE(returned_lane, 2, 64),
    CASE(foreign_mask, 2, 64),
    CASE(deadlock, 2, 64),
    CASE(failed_assert, 2, 64),
    CASE(trap, 2, 64),
    CASE(division_by_zero, 2, 64),
    CASE(endless_reads, 2, 64),
    CASE(endless_mistakes, 2, 64),
    CASE(endless_arithmetic, 2, 64),
    CASE(endless_barriers, 2, 64),
    CASE(recursion, 2, 64),
};

}  // namespace

extern "C" const char* run(const char* name, const Memory* memory) {
  return run_case(kCases, name, *memory);
}
