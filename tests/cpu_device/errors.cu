// Needs compute capability 8.0.
//
// Kernels that are wrong, each in its own way. The CPU device must say what is wrong and where, and the
// next launch of the same process must work.
//
// Usage: errors CASE..., printing `CASE: error_name text` and, from a valid kernel launched after it,
// `CASE.after: sum sum`. Only the CPU device is meant to run this: on a GPU most of these errors hang or
// leave a context that cannot be used any more.
//
// The tests look up line numbers by the markers `// LINE name`.
#include "common/cuda/async_copy.h"
#include "common/cuda/barrier.h"
#include "common/cuda/reduce.h"
#include "common/cuda/tensor_core.h"
#include "program.h"

// After program.h, as kernels have it: whichever order, assert() must be the device's.
#include <cassert>
#include <thread>

constexpr unsigned kFullMask = 0xffffffffu;

// True for one thread of the grid that is in the middle of everything.
__device__ bool is_culprit() {
  return blockIdx.x == 1 && blockIdx.y == 2 && blockIdx.z == 0 && threadIdx.x == 3 &&
         threadIdx.y == 1 && threadIdx.z == 0;
}

__device__ bool is_block_of_culprit() {
  return blockIdx.x == 1 && blockIdx.y == 2 && blockIdx.z == 0;
}

__device__ int linear_thread() {
  return threadIdx.y * blockDim.x + threadIdx.x;
}

// Half a warp waits for lanes that wait elsewhere.
__global__ void missing_lanes(int* out) {
  if (is_block_of_culprit() && linear_thread() % 32 < 16) {
    out[0] = __shfl_sync(kFullMask, 1, 0);  // LINE missing_lanes.shuffle
  }
  __syncthreads();  // LINE missing_lanes.barrier
}

// Warp 0 waits for warp 1, whose halves wait for each other.
__global__ void stuck_warp(int* out) {
  if (is_block_of_culprit() && linear_thread() >= 32) {
    if (linear_thread() < 48) {
      __syncwarp();  // LINE stuck_warp.syncwarp
    } else {
      out[0] = __ballot_sync(kFullMask, 1);  // LINE stuck_warp.ballot
    }
  }
  __syncthreads();  // LINE stuck_warp.barrier
}

// Lane 1 takes part in the operation of the odd lanes, the even lanes wait for it too.
__global__ void different_masks(int* out) {
  const unsigned mask = linear_thread() % 2 == 0 ? 0x55555557u : 0xaaaaaaaau;
  out[linear_thread()] = __shfl_xor_sync(mask, 1, 2);  // LINE different_masks.shuffle
  __syncthreads();                                     // LINE different_masks.barrier
}

__global__ void early_return(int* out) {
  if (is_culprit()) return;
  __syncthreads();  // LINE early_return
  out[0] = 1;
}

__global__ void divergent_barriers(int* out) {
  if (is_block_of_culprit() && threadIdx.y == 1) {
    __syncthreads();  // LINE divergent_barriers.one
  } else {
    __syncthreads();  // LINE divergent_barriers.other
  }
  out[0] = 1;
}

__global__ void barrier_kinds(int* out) {
  if (threadIdx.x == 0) {
    out[0] = __syncthreads_count(1);  // LINE barrier_kinds.count
  } else {
    out[0] = __syncthreads_or(1);  // LINE barrier_kinds.or
  }
}

__global__ void foreign_mask(int* out) {
  const unsigned mask = is_culprit() ? ~(1u << (linear_thread() % 32)) : kFullMask;
  out[0] = __shfl_down_sync(mask, 1, 1);  // LINE foreign_mask
}

__global__ void failed_assert(int* out) {
  out[0] = 1;
  assert(!is_culprit() && "thread 3 must not come here");  // LINE failed_assert
}

__global__ void trap(int* out) {
  out[0] = 1;
  if (is_culprit()) __trap();  // LINE trap
}

__global__ void null_pointer(int* out, int* null) {
  out[0] = 1;
  if (is_culprit()) *static_cast<volatile int*>(null) = 1;
}

__global__ void wild_pointer(int* out, const volatile int* wild) {
  if (is_culprit()) out[0] = *wild;
}

__global__ void stack_overflow(int* out, int index) {
  volatile char big[256 * 1024];
  for (int i = 0; i < static_cast<int>(sizeof(big)); i += 1024) big[i] = static_cast<char>(i >> 10);
  out[0] = big[index];
}

__device__ int endless_recursion(volatile int* out, int depth) {
  out[0] = depth;
  return out[1] == 0 ? depth : endless_recursion(out, depth + 1) + out[0];
}

__global__ void recursion(int* out) {
  out[1] = 1;
  if (is_culprit()) out[0] = endless_recursion(out, 0);
}

__global__ void endless_loop(volatile int* flag) {
  if (!is_culprit()) return;
  while (*flag == 0) {
  }
}

// Longer than the time limit in all, but no block is.
__global__ void many_short_blocks(volatile int* out) {
  for (int i = 0; i < 30000000; ++i) out[0] = i;
}

// One lane of 32 is missing.
__global__ void mma_without_a_lane(int* out) {
  if (is_culprit()) return;
  float c[4] = {};
  const uint32_t a[4] = {};
  mma<__nv_bfloat16>(c, a, 0, 0);  // LINE mma_without_a_lane
  out[0] = static_cast<int>(c[0]);
}

__global__ void small_warp(int* out) {
  float c[4] = {};
  const uint32_t a[4] = {};
  mma<__half>(c, a, 0, 0);  // LINE small_warp
  out[0] = static_cast<int>(c[0]);
}

__global__ void different_matrices(int* out) {
  const char* row = dynamic_smem<char>() + 16 * (linear_thread() % 32);
  uint32_t four[4] = {}, two[2] = {};
  if (linear_thread() % 32 < 8) {
    ldmatrix_trans<4>(four, row);  // LINE different_matrices.four
  } else {
    ldmatrix<2>(two, row);  // LINE different_matrices.two
  }
  out[0] = static_cast<int>(four[0] + two[0]);
}

__global__ void misaligned_row(int* out) {
  char* row = dynamic_smem<char>() + 16 * (linear_thread() % 32) + (is_culprit() ? 8 : 0);
  const uint32_t r[4] = {};
  stmatrix<4>(row, r);  // LINE misaligned_row
  out[0] = 1;
}

__global__ void row_elsewhere(int* out) {
  uint32_t r[2];
  const void* row = is_culprit() ? static_cast<const void*>(out) : dynamic_smem<char>();
  ldmatrix<2>(r, row);  // LINE row_elsewhere
  out[0] = static_cast<int>(r[0]);
}

__global__ void misaligned_target(int* out) {
  const int offset = is_culprit() ? 4 : 0;
  cp_async_16(dynamic_smem<char>() + 16 * linear_thread() + offset, out);  // LINE misaligned_target
  cp_async_commit();
  cp_async_wait<0>();
}

__global__ void misaligned_source(int* out) {
  const int offset = is_culprit() ? 1 : 0;
  cp_async_16(dynamic_smem<char>() + 16 * linear_thread(), out + offset);  // LINE misaligned_source
  cp_async_commit();
  cp_async_wait<0>();
}

__global__ void misaligned_sum(float* sums) {
  const float x[4] = {};
  reduce_add(sums + (is_culprit() ? 2 : 0), x);  // LINE misaligned_sum
}

// Both warps wait, each for the other to arrive at its barrier.
__global__ void crossed_barriers(int* out) {
  if (linear_thread() < 32) {
    barrier_sync(1, 64);  // LINE crossed_barriers.one
    barrier_arrive(2, 64);
  } else {
    barrier_sync(2, 64);  // LINE crossed_barriers.other
    barrier_arrive(1, 64);
  }
  out[0] = 1;
}

// Warp 0 arrives for the second phase before warp 1 has for the first.
__global__ void barrier_runs_ahead(int* out) {
  if (linear_thread() < 32) {
    for (int i = 0; i < 2; ++i) barrier_arrive(1, 64);  // LINE barrier_runs_ahead
    barrier_arrive(2, 64);
  } else {
    barrier_sync(2, 64);
  }
  out[0] = 1;
}

__global__ void barrier_of_some(int* out) {
  if (is_block_of_culprit() && linear_thread() < 32) return;
  barrier_sync(0, 64);  // LINE barrier_of_some
  out[0] = 1;
}

__global__ void unreached(int* out) {
  out[0] = 1;
}

__global__ void valid(int* out) {
  __shared__ int warp_sums[2];
  int value = linear_thread();
  for (int delta = 16; delta > 0; delta /= 2) value += __shfl_down_sync(kFullMask, value, delta);
  if (linear_thread() % 32 == 0) warp_sums[linear_thread() / 32] = value;
  __syncthreads();
  if (linear_thread() == 0 && blockIdx.y == 0) out[blockIdx.x] = warp_sums[0] + warp_sums[1];
}

const dim3 kGrid(4, 3, 2), kBlock(8, 8);

void report(const std::string& name, cudaError_t error) {
  std::printf("%s: %s %s\n", name.c_str(), cudaGetErrorName(error), launch_error.c_str());
}

void run_valid(const std::string& name) {
  DeviceArray<int> out(std::vector<int>(kGrid.x, -1));
  run(valid, dim3(kGrid.x, 2), kBlock, 0, out.data());
  print(name, out);
}

// Launches `kernel`, which is wrong, and `valid` in turn. Returns the text of the error; if it changes or
// the valid kernel fails, all of what came.
std::string alternate(void (*kernel)(int*)) {
  use_schedule_of_environment();
  DeviceArray<int> out(std::vector<int>(64, 0));
  std::string first, others;
  for (int i = 0; i < 200; ++i) {
    const cudaError_t error = launch(kernel, dim3(2, 3), kBlock, 0, nullptr, out.data());
    const std::string text = std::string(cudaGetErrorName(error)) + " " + launch_error;
    if (i == 0) first = text;
    if (text != first) others += "; " + text;
    if (launch(valid, dim3(2), kBlock, 0, nullptr, out.data()) != cudaSuccess) {
      others += "; " + launch_error;
    }
  }
  return first + others;
}

// Two host threads launch at the same time and make mistakes of their own.
void run_two_host_threads() {
  std::string texts[2];
  std::thread one([&texts] { texts[0] = alternate(trap); });
  std::thread other([&texts] { texts[1] = alternate(foreign_mask); });
  one.join();
  other.join();
  DeviceArray<int> out(std::vector<int>(64, 0));
  const cudaError_t error = launch(trap, dim3(2, 3), kBlock, 0, nullptr, out.data());
  const std::string text = cudaGetErrorString(error);
  std::thread([] { alternate(foreign_mask); }).join();  // an error of the same code
  const bool is_kept = text == cudaGetErrorString(error);
  std::printf("two_host_threads.text_is_kept: %d\n", is_kept);
  std::printf("two_host_threads.one: %s\ntwo_host_threads.other: %s\n", texts[0].c_str(),
              texts[1].c_str());
}

// `out` has 64 elements, all zero.
cudaError_t run_wrong(const std::string& name, int* out) {
  int* const null = nullptr;
  const volatile int* const wild = reinterpret_cast<const volatile int*>(0x10);
  const dim3 one(1);
  if (name == "missing_lanes") return launch(missing_lanes, kGrid, kBlock, 0, nullptr, out);
  if (name == "stuck_warp") return launch(stuck_warp, kGrid, kBlock, 0, nullptr, out);
  if (name == "different_masks") return launch(different_masks, one, kBlock, 0, nullptr, out);
  if (name == "early_return") return launch(early_return, kGrid, kBlock, 0, nullptr, out);
  if (name == "divergent_barriers")
    return launch(divergent_barriers, kGrid, kBlock, 0, nullptr, out);
  if (name == "barrier_kinds") return launch(barrier_kinds, one, kBlock, 0, nullptr, out);
  if (name == "foreign_mask") return launch(foreign_mask, kGrid, kBlock, 0, nullptr, out);
  if (name == "failed_assert") return launch(failed_assert, kGrid, kBlock, 0, nullptr, out);
  if (name == "trap") return launch(trap, kGrid, kBlock, 0, nullptr, out);
  if (name == "null_pointer") return launch(null_pointer, kGrid, kBlock, 0, nullptr, out, null);
  if (name == "wild_pointer") return launch(wild_pointer, kGrid, kBlock, 0, nullptr, out, wild);
  if (name == "stack_overflow") return launch(stack_overflow, one, one, 0, nullptr, out, 1024);
  if (name == "recursion") return launch(recursion, kGrid, kBlock, 0, nullptr, out);
  if (name == "endless_loop") return launch(endless_loop, kGrid, kBlock, 0, nullptr, out + 2);
  if (name == "many_short_blocks")
    return launch(many_short_blocks, dim3(240), one, 0, nullptr, out);
  const size_t bytes = 2048;
  float* const sums = reinterpret_cast<float*>(out);
  if (name == "mma_without_a_lane") {
    return launch(mma_without_a_lane, kGrid, kBlock, 0, nullptr, out);
  }
  if (name == "small_warp") return launch(small_warp, one, dim3(8, 5), 0, nullptr, out);
  if (name == "different_matrices") {
    return launch(different_matrices, one, kBlock, bytes, nullptr, out);
  }
  if (name == "misaligned_row") return launch(misaligned_row, kGrid, kBlock, bytes, nullptr, out);
  if (name == "row_elsewhere") return launch(row_elsewhere, kGrid, kBlock, bytes, nullptr, out);
  if (name == "misaligned_target") {
    return launch(misaligned_target, kGrid, kBlock, bytes, nullptr, out);
  }
  if (name == "misaligned_source") {
    return launch(misaligned_source, kGrid, kBlock, bytes, nullptr, out);
  }
  if (name == "misaligned_sum") return launch(misaligned_sum, kGrid, kBlock, 0, nullptr, sums);
  if (name == "crossed_barriers") return launch(crossed_barriers, one, kBlock, 0, nullptr, out);
  if (name == "barrier_runs_ahead") return launch(barrier_runs_ahead, one, kBlock, 0, nullptr, out);
  if (name == "barrier_of_some") return launch(barrier_of_some, kGrid, kBlock, 0, nullptr, out);
  if (name == "too_many_threads") return launch(unreached, one, dim3(32, 33), 0, nullptr, out);
  if (name == "block_too_deep") return launch(unreached, one, dim3(1, 1, 65), 0, nullptr, out);
  if (name == "empty_block") return launch(unreached, one, dim3(0), 0, nullptr, out);
  if (name == "grid_too_tall") return launch(unreached, dim3(1, 65536), one, 0, nullptr, out);
  if (name == "empty_grid") return launch(unreached, dim3(4, 0), one, 0, nullptr, out);
  if (name == "too_much_shared") return launch(unreached, one, one, 228 * 1024, nullptr, out);
  std::fprintf(stderr, "no case %s\n", name.c_str());
  std::exit(2);
}

int main(int argc, char** argv) {
  use_schedule_of_environment();
  DeviceArray<int> out(std::vector<int>(64, 0));
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "two_host_threads") {
      run_two_host_threads();
      continue;
    }
    CHECK(cudaMemset(out.data(), 0, 64 * sizeof(int)));
    report(name, run_wrong(name, out.data()));
    run_valid(name + ".after");
  }
}
