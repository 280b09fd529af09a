// Asynchronous copies, matrices of tensor cores and named barriers. Beside each mistake stands a kernel that
// does the same correctly.
#include "common/cuda/async_copy.h"
#include "common/cuda/barrier.h"
#include "common/cuda/tensor_core.h"
#include "program.h"

namespace {

// ---------------------------------------------------------------- copies, by 64 threads

// In another warp.
__device__ int partner() {
  return threadIdx.x ^ 32;
}

__global__ void copy_wait_barrier_read(Memory m) {
  __shared__ __align__(16) float tile[256];
  cp_async_16(tile + 4 * threadIdx.x, m.x + 4 * threadIdx.x);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  m.y[threadIdx.x] = tile[4 * partner()];
}

__global__ void copy_barrier_read(Memory m) {
  __shared__ __align__(16) float tile[256];
  cp_async_16(tile + 4 * threadIdx.x, m.x + 4 * threadIdx.x);  // LINE copy_barrier_read.copy
  cp_async_commit();
  __syncthreads();
  m.y[threadIdx.x] = tile[4 * partner()];  // LINE copy_barrier_read.read
}

__global__ void copy_wait_read(Memory m) {
  __shared__ __align__(16) float tile[256];
  cp_async_16(tile + 4 * threadIdx.x, m.x + 4 * threadIdx.x);  // LINE copy_wait_read.copy
  cp_async_commit();
  cp_async_wait<0>();
  m.y[threadIdx.x] = tile[4 * partner()];  // LINE copy_wait_read.read
}

// The copies are old when they are waited for.
__global__ void copy_barrier_wait_read(Memory m) {
  __shared__ __align__(16) float tile[256];
  cp_async_16(tile + 4 * threadIdx.x, m.x + 4 * threadIdx.x);  // LINE copy_barrier_wait_read.copy
  cp_async_commit();
  __syncthreads();
  cp_async_wait<0>();
  m.y[threadIdx.x] = tile[4 * partner()];  // LINE copy_barrier_wait_read.read
}

__global__ void copy_wait_read_own(Memory m) {
  __shared__ __align__(16) float tile[256];
  cp_async_16(tile + 4 * threadIdx.x, m.x + 4 * threadIdx.x);
  cp_async_commit();
  cp_async_wait<0>();
  m.y[threadIdx.x] = tile[4 * threadIdx.x + 1];
}

__global__ void copy_read_own(Memory m) {
  __shared__ __align__(16) float tile[256];
  cp_async_16(tile + 4 * threadIdx.x, m.x + 4 * threadIdx.x);  // LINE copy_read_own.copy
  cp_async_commit();
  m.y[threadIdx.x] = tile[4 * threadIdx.x + 1];  // LINE copy_read_own.read
  cp_async_wait<0>();
}

// A group that has not ended is not waited for.
__global__ void copy_without_commit(Memory m) {
  __shared__ __align__(16) float tile[256];
  cp_async_16(tile + 4 * threadIdx.x, m.x + 4 * threadIdx.x);  // LINE copy_without_commit.copy
  cp_async_wait<0>();
  m.y[threadIdx.x] = tile[4 * threadIdx.x];  // LINE copy_without_commit.read
}

template <int kPending>
__device__ void two_groups(const Memory& m) {
  __shared__ __align__(16) float first[256], second[256];
  cp_async_16(first + 4 * threadIdx.x, m.x + 4 * threadIdx.x);
  cp_async_commit();
  cp_async_16(second + 4 * threadIdx.x, m.x + 4 * threadIdx.x);  // LINE too_few_groups.copy
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();
  float sum = first[4 * partner()];
  cp_async_wait<kPending>();
  __syncthreads();
  sum += second[4 * partner()];  // LINE too_few_groups.read
  m.y[threadIdx.x] = sum;
}
__global__ void all_groups(Memory m) {
  two_groups<0>(m);
}
__global__ void too_few_groups(Memory m) {
  two_groups<1>(m);
}

// Two stages, the next of which is filled while one is read.
__global__ void stages(Memory m) {
  __shared__ __align__(16) float tile[2][256];
  const auto start = [&](int i) {
    cp_async_16(tile[i % 2] + 4 * threadIdx.x, m.x + 4 * threadIdx.x, i < 5);
    cp_async_commit();
  };
  float sum = 0.0f;
  start(0);
  for (int i = 0; i < 5; ++i) {
    cp_async_wait<0>();
    __syncthreads();
    start(i + 1);
    sum += tile[i % 2][4 * partner()];
  }
  m.y[threadIdx.x] = sum;
}

__global__ void stage_overwritten(Memory m) {
  __shared__ __align__(16) float tile[2][256];
  float sum = 0.0f;
  cp_async_16(tile[0] + 4 * threadIdx.x, m.x + 4 * threadIdx.x);
  cp_async_commit();
  for (int i = 0; i < 5; ++i) {
    float* next = tile[(i + 1) % 2];
    cp_async_16(next + 4 * threadIdx.x, m.x + 4 * threadIdx.x);  // LINE stage_overwritten.write
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    sum += tile[i % 2][4 * partner()];  // LINE stage_overwritten.read
  }
  m.y[threadIdx.x] = sum;
}

__global__ void copy_wait_barrier_write(Memory m) {
  __shared__ __align__(16) float tile[256];
  cp_async_16(tile + 4 * threadIdx.x, m.x + 4 * threadIdx.x);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  tile[4 * partner()] = 1.0f;
  __syncthreads();
  m.y[threadIdx.x] = tile[4 * threadIdx.x];
}

__global__ void copy_barrier_write(Memory m) {
  __shared__ __align__(16) float tile[256];
  cp_async_16(tile + 4 * threadIdx.x, m.x + 4 * threadIdx.x);  // LINE copy_barrier_write.copy
  cp_async_commit();
  __syncthreads();
  tile[4 * partner() + 2] = 1.0f;  // LINE copy_barrier_write.write
  cp_async_wait<0>();
  __syncthreads();
  m.y[threadIdx.x] = tile[4 * threadIdx.x];
}

// A second copy to the place, before the first has arrived.
__global__ void copy_twice(Memory m) {
  __shared__ __align__(16) float tile[256];
  for (int i = 0; i < 2; ++i) {
    cp_async_16(tile + 4 * threadIdx.x, m.x + 4 * threadIdx.x);  // LINE copy_twice
    cp_async_commit();
  }
  cp_async_wait<0>();
  m.y[threadIdx.x] = tile[4 * threadIdx.x];
}

// What is outside is not read.
__global__ void copies_rest(Memory m) {
  __shared__ __align__(16) float tile[256];
  const int first = 4 * threadIdx.x;
  cp_async_16(tile + first, m.x + first, first + 4 <= m.n);
  cp_async_commit();
  cp_async_wait<0>();
  m.y[threadIdx.x] = tile[first];
}

__global__ void copies_past_end(Memory m) {
  __shared__ __align__(16) float tile[256];
  const int first = 4 * threadIdx.x;
  cp_async_16(tile + first, m.x + first);  // LINE copies_past_end
  cp_async_commit();
  cp_async_wait<0>();
  m.y[threadIdx.x] = tile[first];
}

__global__ void copies_misaligned(Memory m) {
  __shared__ __align__(16) float tile[260];
  const int first = 4 * threadIdx.x + (threadIdx.x == 5 ? 2 : 0);
  cp_async_16(tile + 4 * threadIdx.x, m.x + first);  // LINE copies_misaligned
  cp_async_commit();
  cp_async_wait<0>();
  m.y[threadIdx.x] = tile[4 * threadIdx.x];
}

__global__ void copies_past_shared(Memory m) {
  float* tile = dynamic_smem<float>();
  cp_async_16(tile + 4 * threadIdx.x, m.x + 4 * threadIdx.x);  // LINE copies_past_shared
  cp_async_commit();
  cp_async_wait<0>();
  m.y[threadIdx.x] = 1.0f;
}

// ---------------------------------------------------------------- matrices, by a warp

constexpr int kRow = 24;  // 16-bit numbers from one row to the next

// Fills `num_rows` rows of 8 numbers.
__device__ void fill_rows(uint16_t* numbers, int num_rows) {
  for (int i = threadIdx.x; i < 8 * num_rows; i += 32) {
    numbers[i / 8 * kRow + i % 8] = static_cast<uint16_t>(i);
  }
}

__device__ float sum_of(const uint32_t (&r)[4]) {
  return static_cast<float>(r[0] + r[1] + r[2] + r[3]);
}

__global__ void loads_matrices(Memory m) {
  __shared__ __align__(16) uint16_t numbers[32 * kRow];
  uint32_t r[4];
  fill_rows(numbers, 32);
  __syncwarp();
  ldmatrix<4>(r, numbers + threadIdx.x * kRow);
  __syncwarp();
  stmatrix<4>(numbers + threadIdx.x * kRow, r);
  __syncwarp();
  ldmatrix_trans<4>(r, numbers + threadIdx.x * kRow);
  m.y[threadIdx.x] = sum_of(r);
}

// Lanes without a row give an address that is not read.
__global__ void loads_one_matrix(Memory m) {
  __shared__ __align__(16) uint16_t numbers[8 * kRow];
  uint32_t r[1];
  fill_rows(numbers, 8);
  __syncwarp();
  ldmatrix<1>(r, numbers + threadIdx.x * kRow);
  m.y[threadIdx.x] = static_cast<float>(r[0]);
}

__global__ void misaligned_row(Memory m) {
  __shared__ __align__(16) uint16_t numbers[32 * kRow];
  uint32_t r[4];
  for (int i = threadIdx.x; i < 32 * kRow; i += 32) numbers[i] = static_cast<uint16_t>(i);
  __syncwarp();
  ldmatrix<4>(r, numbers + threadIdx.x * kRow + (threadIdx.x == 5 ? 4 : 0));  // LINE misaligned_row
  m.y[threadIdx.x] = sum_of(r);
}

__global__ void row_past_end(Memory m) {
  uint16_t* numbers = dynamic_smem<uint16_t>();
  uint32_t r[4];
  fill_rows(numbers, 31);
  __syncwarp();
  ldmatrix<4>(r, numbers + threadIdx.x * kRow);  // LINE row_past_end
  m.y[threadIdx.x] = sum_of(r);
}

__global__ void unwritten_row(Memory m) {
  __shared__ __align__(16) uint16_t numbers[32 * kRow];
  uint32_t r[4];
  fill_rows(numbers, 31);
  __syncwarp();
  ldmatrix_trans<4>(r, numbers + threadIdx.x * kRow);  // LINE unwritten_row
  m.y[threadIdx.x] = sum_of(r);
}

// A lane reads what others have written.
__global__ void rows_without_barrier(Memory m) {
  __shared__ __align__(16) uint16_t numbers[8 * 32];
  uint32_t r[4];
  for (int i = 0; i < 8; ++i) {
    numbers[32 * i + threadIdx.x] = 1;  // LINE rows_without_barrier.write
  }
  ldmatrix<4>(r, numbers + 8 * threadIdx.x);  // LINE rows_without_barrier.read
  m.y[threadIdx.x] = sum_of(r);
}

__global__ void store_without_barrier(Memory m) {
  __shared__ __align__(16) uint16_t numbers[32 * kRow];
  const uint32_t r[4] = {threadIdx.x, 1, 2, 3};
  stmatrix<4>(numbers + threadIdx.x * kRow, r);              // LINE store_without_barrier.write
  m.y[threadIdx.x] = numbers[(threadIdx.x ^ 1) * kRow + 1];  // LINE store_without_barrier.read
}

__global__ void row_in_global_memory(Memory m) {
  uint32_t r[1];
  ldmatrix<1>(r, m.x + 4 * threadIdx.x);  // LINE row_in_global_memory
  m.y[threadIdx.x] = static_cast<float>(r[0]);
}

// ---------------------------------------------------------------- named barriers, by 128 threads

__device__ int warp_of_block() {
  return threadIdx.x / 32;
}

// Warp 0 writes, warp 1 reads; the others do nothing.
__global__ void handover(Memory m) {
  __shared__ float tile[32];
  if (warp_of_block() == 0) {
    tile[threadIdx.x] = m.x[threadIdx.x];
    barrier_arrive(1, 64);
  } else if (warp_of_block() == 1) {
    barrier_sync(1, 64);
    m.y[threadIdx.x - 32] = tile[threadIdx.x ^ 33];
  }
}

__global__ void handover_without_barrier(Memory m) {
  __shared__ float tile[32];
  if (warp_of_block() == 0) {
    tile[threadIdx.x] = m.x[threadIdx.x];  // LINE handover_without_barrier.write
    barrier_arrive(1, 64);
  } else if (warp_of_block() == 1) {
    const float value = tile[threadIdx.x ^ 33];  // LINE handover_without_barrier.read
    barrier_sync(1, 64);
    m.y[threadIdx.x - 32] = value;
  }
}

// Of two tiles each has a barrier.
template <int kFirst>
__device__ void two_tiles(const Memory& m) {
  __shared__ float first[32], second[32];
  if (warp_of_block() == 0) {
    first[threadIdx.x] = m.x[threadIdx.x];
    barrier_arrive(1, 64);
    second[threadIdx.x] = m.x[threadIdx.x];  // LINE wrong_barrier.write
    barrier_arrive(2, 64);
  } else if (warp_of_block() == 1) {
    barrier_sync(kFirst, 64);
    float sum = second[threadIdx.x ^ 33];  // LINE wrong_barrier.read
    barrier_sync(3 - kFirst, 64);
    sum += first[threadIdx.x ^ 33];
    m.y[threadIdx.x - 32] = sum;
  }
}
__global__ void right_barrier(Memory m) {
  two_tiles<2>(m);
}
__global__ void wrong_barrier(Memory m) {
  two_tiles<1>(m);
}

// Warp 0 fills a buffer again and again, warps 1 to 3 read it.
template <bool kReadsTooLate, int kNumReaders>
__device__ void refill(const Memory& m) {
  __shared__ float tile[32];
  constexpr int kRounds = 3;
  const int lane = threadIdx.x % 32;
  if (warp_of_block() == 0) {
    for (int i = 0; i < kRounds; ++i) {
      if (i > 0) barrier_sync(2, 32 + 32 * kNumReaders);  // it may be filled
      tile[lane] = m.x[lane];                             // LINE refill.write
      barrier_arrive(1, 128);                             // it is full
    }
  } else {
    float sum = 0.0f;
    for (int i = 0; i < kRounds; ++i) {
      barrier_sync(1, 128);
      if (!kReadsTooLate) sum += tile[lane ^ 1];  // LINE refill.read
      if (i + 1 < kRounds && warp_of_block() <= kNumReaders)
        barrier_arrive(2, 32 + 32 * kNumReaders);
      if (kReadsTooLate) sum += tile[lane ^ 1];  // LINE refill.late_read
    }
    if (warp_of_block() == 1) m.y[lane] = sum;
  }
}
__global__ void refills(Memory m) {
  refill<false, 3>(m);
}
__global__ void reads_what_it_gave_back(Memory m) {
  refill<true, 3>(m);
}
__global__ void forgets_a_reader(Memory m) {
  refill<false, 2>(m);
}

// What warp 1 knows of warp 0, warp 2 knows from warp 1.
__global__ void barriers_in_a_row(Memory m) {
  __shared__ float tile[32];
  const int lane = threadIdx.x % 32;
  if (warp_of_block() == 0) {
    tile[lane] = m.x[lane];
    barrier_arrive(1, 64);
  } else if (warp_of_block() == 1) {
    barrier_sync(1, 64);
    barrier_arrive(2, 64);
  } else if (warp_of_block() == 2) {
    barrier_sync(2, 64);
    m.y[lane] = tile[lane ^ 1];
  }
}

// Who arrives knows nothing of who waits.
__global__ void arrives_and_reads(Memory m) {
  __shared__ float tile[32];
  const int lane = threadIdx.x % 32;
  if (warp_of_block() == 0) {
    tile[lane] = m.x[lane];  // LINE arrives_and_reads.write
    barrier_sync(1, 64);
  } else if (warp_of_block() == 1) {
    barrier_arrive(1, 64);
    m.y[lane] = tile[lane ^ 1];  // LINE arrives_and_reads.read
  }
}

// The lanes of a warp meet too.
__global__ void barrier_of_one_warp(Memory m) {
  __shared__ float tile[128];
  tile[threadIdx.x] = m.x[threadIdx.x % 32];
  barrier_sync(1 + warp_of_block(), 32);
  if (warp_of_block() == 0) m.y[threadIdx.x] = tile[threadIdx.x ^ 1];
}

// Half of the block calls it at another line.
__global__ void barrier_of_the_block(Memory m) {
  __shared__ float tile[128];
  tile[threadIdx.x] = m.x[threadIdx.x % 32];
  if (threadIdx.x < 64) {
    barrier_sync(0, 128);
  } else {
    barrier_sync(0, 128);
  }
  if (warp_of_block() == 0) m.y[threadIdx.x] = tile[127 - threadIdx.x];
}

// What a copy brings is handed over.
__global__ void copy_handover(Memory m) {
  __shared__ __align__(16) float tile[128];
  const int lane = threadIdx.x % 32;
  if (warp_of_block() == 0) {
    cp_async_16(tile + 4 * lane, m.x + 4 * (lane % 8));
    cp_async_commit();
    cp_async_wait<0>();
    barrier_arrive(1, 64);
  } else if (warp_of_block() == 1) {
    barrier_sync(1, 64);
    m.y[lane] = tile[4 * (lane ^ 1)];
  }
}

__global__ void copy_handover_without_wait(Memory m) {
  __shared__ __align__(16) float tile[128];
  const int lane = threadIdx.x % 32;
  if (warp_of_block() == 0) {
    cp_async_16(tile + 4 * lane, m.x + 4 * (lane % 8));  // LINE copy_handover_without_wait.copy
    cp_async_commit();
    barrier_arrive(1, 64);
  } else if (warp_of_block() == 1) {
    barrier_sync(1, 64);
    m.y[lane] = tile[4 * (lane ^ 1)];  // LINE copy_handover_without_wait.read
  }
}

// ---------------------------------------------------------------- what ends a block

__global__ void barrier_id_16(Memory m) {
  m.y[threadIdx.x] = 0.0f;
  barrier_sync(16, 128);  // LINE barrier_id_16
}

__global__ void barrier_of_48(Memory m) {
  m.y[threadIdx.x] = 0.0f;
  barrier_arrive(1, 48);  // LINE barrier_of_48
}

__global__ void barrier_of_too_many(Memory m) {
  m.y[threadIdx.x] = 0.0f;
  barrier_sync(1, 160);  // LINE barrier_of_too_many
}

__global__ void counts_differ(Memory m) {
  m.y[threadIdx.x] = 0.0f;
  if (warp_of_block() == 0) {
    barrier_sync(1, 64);  // LINE counts_differ.one
  } else {
    barrier_sync(1, 128);  // LINE counts_differ.other
  }
}

__global__ void arrives_twice(Memory m) {
  m.y[threadIdx.x] = 0.0f;
  if (warp_of_block() == 0) {
    barrier_arrive(1, 96);
    barrier_arrive(1, 96);  // LINE arrives_twice
  }
}

__global__ void barrier_deadlock(Memory m) {
  m.y[threadIdx.x] = 0.0f;
  if (warp_of_block() == 0) barrier_sync(3, 96);  // LINE barrier_deadlock.one
  if (warp_of_block() == 1) barrier_arrive(3, 96);
  if (warp_of_block() == 2) barrier_sync(4, 64);  // LINE barrier_deadlock.other
}

__global__ void returns_before_barrier(Memory m) {
  m.y[threadIdx.x] = 0.0f;
  if (warp_of_block() == 1) return;
  barrier_sync(1, 128);  // LINE returns_before_barrier
}

__global__ void lanes_call_different_barriers(Memory m) {
  m.y[threadIdx.x] = 0.0f;
  barrier_sync(1 + threadIdx.x % 2, 128);  // LINE lanes_call_different_barriers
}

__global__ void mixes_barriers(Memory m) {
  m.y[threadIdx.x] = 0.0f;
  if (warp_of_block() == 0) {
    __syncthreads();  // LINE mixes_barriers.one
  } else {
    barrier_sync(0, 128);  // LINE mixes_barriers.other
  }
}

__global__ void mma_after_return(Memory m) {
  m.y[threadIdx.x] = 0.0f;
  if (threadIdx.x == 5) return;
  float c[4] = {};
  const uint32_t a[4] = {};
  mma<__half>(c, a, 0, 0);  // LINE mma_after_return
  m.y[0] = c[0];
}

__global__ void mma_by_half_a_warp(Memory m) {
  m.y[threadIdx.x] = 0.0f;
  float c[4] = {};
  const uint32_t a[4] = {};
  if (threadIdx.x % 32 < 16) {
    mma<__half>(c, a, 0, 0);  // LINE mma_by_half_a_warp.one
  } else {
    mma<__half>(c, a, 0, 0);  // LINE mma_by_half_a_warp.other
  }
  m.y[threadIdx.x] = c[0];
}

const Case kCases[] = {
    CASE(copy_wait_barrier_read, 1, 64),
    CASE(copy_barrier_read, 1, 64),
    CASE(copy_wait_read, 1, 64),
    CASE(copy_barrier_wait_read, 1, 64),
    CASE(copy_wait_read_own, 1, 64),
    CASE(copy_read_own, 1, 64),
    CASE(copy_without_commit, 1, 64),
    CASE(all_groups, 1, 64),
    CASE(too_few_groups, 1, 64),
    CASE(stages, 1, 64),
    CASE(stage_overwritten, 1, 64),
    CASE(copy_wait_barrier_write, 1, 64),
    CASE(copy_barrier_write, 1, 64),
    CASE(copy_twice, 1, 64),
    CASE(copies_rest, 1, 64),
    CASE(copies_past_end, 1, 64),
    CASE(copies_misaligned, 1, 64),
    CASE(copies_past_shared, 1, 64, 1008),
    CASE(loads_matrices, 1, 32),
    CASE(loads_one_matrix, 1, 32),
    CASE(misaligned_row, 1, 32),
    CASE(row_past_end, 1, 32, 31 * kRow * 2),
    CASE(unwritten_row, 1, 32),
    CASE(rows_without_barrier, 1, 32),
    CASE(store_without_barrier, 1, 32),
    CASE(row_in_global_memory, 1, 32),
    CASE(handover, 1, 128),
    CASE(handover_without_barrier, 1, 128),
    CASE(right_barrier, 1, 128),
    CASE(wrong_barrier, 1, 128),
    CASE(refills, 1, 128),
    CASE(reads_what_it_gave_back, 1, 128),
    CASE(forgets_a_reader, 1, 128),
    CASE(barriers_in_a_row, 1, 128),
    CASE(arrives_and_reads, 1, 128),
    CASE(barrier_of_one_warp, 1, 128),
    CASE(barrier_of_the_block, 1, 128),
    CASE(copy_handover, 1, 128),
    CASE(copy_handover_without_wait, 1, 128),
    CASE(barrier_id_16, 1, 128),
    CASE(barrier_of_48, 1, 128),
    CASE(barrier_of_too_many, 1, 128),
    CASE(counts_differ, 1, 128),
    CASE(arrives_twice, 1, 128),
    CASE(barrier_deadlock, 1, 128),
    CASE(returns_before_barrier, 1, 128),
    CASE(lanes_call_different_barriers, 1, 128),
    CASE(mixes_barriers, 1, 128),
    CASE(mma_after_return, 1, 32),
    CASE(mma_by_half_a_warp, 1, 32),
};

}  // namespace

extern "C" const char* run(const char* name, const Memory* memory) {
  return run_case(kCases, name, *memory);
}
