// Threads, and blocks, that touch one place with nothing between (racecheck). Beside each mistake stands a
// kernel that does the same correctly.
#include "program.h"

namespace {

constexpr unsigned kFullMask = 0xffffffffu;

// ---------------------------------------------------------------- threads of a block

// With 64 threads the partner is in another warp (kFar) or in the same one.
constexpr int kFar = 32, kNear = 1;

template <int kPartner>
__device__ void write_read(const Memory& m) {
  __shared__ float tile[2][32];
  tile[threadIdx.x / 32][threadIdx.x % 32] = m.x[threadIdx.x];  // LINE write_read.write
  const int partner = threadIdx.x ^ kPartner;
  m.y[threadIdx.x] = tile[partner / 32][partner % 32];  // LINE write_read.read
}
__global__ void write_read_far(Memory m) {
  write_read<kFar>(m);
}
__global__ void write_read_near(Memory m) {
  write_read<kNear>(m);
}

__global__ void write_barrier_read(Memory m) {
  __shared__ float tile[64];
  tile[threadIdx.x] = m.x[threadIdx.x];
  __syncthreads();
  m.y[threadIdx.x] = tile[threadIdx.x ^ kFar];
}

__global__ void write_syncwarp_read_near(Memory m) {
  __shared__ float tile[64];
  tile[threadIdx.x] = m.x[threadIdx.x];
  __syncwarp();
  m.y[threadIdx.x] = tile[threadIdx.x ^ kNear];
}

// A __syncwarp does not order two warps.
__global__ void write_syncwarp_read_far(Memory m) {
  __shared__ float tile[64];
  tile[threadIdx.x] = m.x[threadIdx.x];  // LINE write_syncwarp_read_far.write
  __syncwarp();
  m.y[threadIdx.x] = tile[threadIdx.x ^ kFar];  // LINE write_syncwarp_read_far.read
}

// A shuffle makes lanes wait for each other, but orders no memory.
__global__ void write_shuffle_read(Memory m) {
  __shared__ float tile[64];
  tile[threadIdx.x] = m.x[threadIdx.x];  // LINE write_shuffle_read.write
  const float one = __shfl_sync(kFullMask, 1.0f, 0);
  m.y[threadIdx.x] = one * tile[threadIdx.x ^ kNear];  // LINE write_shuffle_read.read
}

__global__ void write_vote_read(Memory m) {
  __shared__ float tile[64];
  tile[threadIdx.x] = m.x[threadIdx.x];  // LINE write_vote_read.write
  const int all = __all_sync(kFullMask, 1);
  m.y[threadIdx.x] = float(all) * tile[threadIdx.x ^ kNear];  // LINE write_vote_read.read
}

__global__ void write_counting_barrier_read(Memory m) {
  __shared__ float tile[64];
  tile[threadIdx.x] = m.x[threadIdx.x];
  const int all = __syncthreads_and(1);
  m.y[threadIdx.x] = float(all) * tile[threadIdx.x ^ kFar];
}

// Each half of a warp waits for its own lanes.
__device__ unsigned mask_of_half() {
  return threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
}

__global__ void half_warp_within(Memory m) {
  __shared__ float tile[64];
  tile[threadIdx.x] = m.x[threadIdx.x];
  __syncwarp(mask_of_half());
  m.y[threadIdx.x] = tile[threadIdx.x ^ 8];
}

__global__ void half_warp_across(Memory m) {
  __shared__ float tile[64];
  tile[threadIdx.x] = m.x[threadIdx.x];  // LINE half_warp_across.write
  __syncwarp(mask_of_half());
  m.y[threadIdx.x] = tile[threadIdx.x ^ 16];  // LINE half_warp_across.read
}

// Order is passed on: lanes 0 to 7 and 8 to 15 meet, then 8 to 15 and 16 to 23.
__global__ void order_is_passed_on(Memory m) {
  __shared__ float tile[32];
  const int lane = threadIdx.x;
  m.y[lane] = 0.0f;
  if (lane < 8) tile[lane] = 1.0f;
  if (lane < 16) __syncwarp(0x0000ffffu);
  if (lane >= 8 && lane < 24) __syncwarp(0x00ffff00u);
  if (lane >= 16 && lane < 24) m.y[lane] = tile[lane - 16];
}

// In a loop the barrier between the reads of one turn and the writes of the next is missing.
__global__ void read_write(Memory m) {
  __shared__ float tile[64];
  float sum = 0.0f;
  for (int i = 0; i < 3; ++i) {
    tile[threadIdx.x] = m.x[threadIdx.x] + i;  // LINE read_write.write
    __syncthreads();
    sum += tile[threadIdx.x ^ kFar];  // LINE read_write.read
  }
  m.y[threadIdx.x] = sum;
}

__global__ void read_barrier_write(Memory m) {
  __shared__ float tile[64];
  float sum = 0.0f;
  for (int i = 0; i < 3; ++i) {
    tile[threadIdx.x] = m.x[threadIdx.x] + i;
    __syncthreads();
    sum += tile[threadIdx.x ^ kFar];
    __syncthreads();
  }
  m.y[threadIdx.x] = sum;
}

__global__ void write_write(Memory m) {
  float* s = dynamic_smem<float>();
  s[threadIdx.x / 2] = m.x[threadIdx.x];  // LINE write_write
  __syncthreads();
  m.y[threadIdx.x] = s[threadIdx.x / 2];
}

__global__ void one_of_two_writes(Memory m) {
  float* s = dynamic_smem<float>();
  if (threadIdx.x % 2 == 0) s[threadIdx.x / 2] = m.x[threadIdx.x];
  __syncthreads();
  m.y[threadIdx.x] = s[threadIdx.x / 2];
}

// Device memory is ordered by the block's barriers, too.
__global__ void write_read_global(Memory m) {
  m.scratch[threadIdx.x] = m.x[threadIdx.x];             // LINE write_read_global.write
  m.y[threadIdx.x] = m.scratch[(threadIdx.x + 1) % 32];  // LINE write_read_global.read
}

__global__ void write_barrier_read_global(Memory m) {
  m.scratch[threadIdx.x] = m.x[threadIdx.x];
  __syncthreads();
  m.y[threadIdx.x] = m.scratch[(threadIdx.x + 1) % 32];
}

__global__ void adds_to_shared(Memory m) {
  __shared__ float sums[2];
  if (threadIdx.x < 2) sums[threadIdx.x] = 0.0f;
  __syncthreads();
  atomicAdd(&sums[threadIdx.x % 2], 1.0f);
  __syncthreads();
  m.y[threadIdx.x] = sums[threadIdx.x % 2];
}

// Whoever comes last adds, too, and then writes.
__global__ void adds_and_writes_shared(Memory m) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.0f;
  __syncthreads();
  atomicAdd(&sum, 1.0f);              // LINE adds_and_writes_shared.add
  if (threadIdx.x == 63) sum = 0.0f;  // LINE adds_and_writes_shared.write
  __syncthreads();
  m.y[threadIdx.x] = sum;
}

__global__ void adds_and_reads_shared(Memory m) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.0f;
  __syncthreads();
  atomicAdd(&sum, 1.0f);   // LINE adds_and_reads_shared.add
  m.y[threadIdx.x] = sum;  // LINE adds_and_reads_shared.read
}

// ---------------------------------------------------------------- parts of a word

__global__ void halves_of_a_word(Memory m) {
  __shared__ __align__(4) __half numbers[64];
  numbers[threadIdx.x] = __float2half(m.x[threadIdx.x]);
  m.y[threadIdx.x] = __half2float(numbers[threadIdx.x]);
  __syncthreads();
  const __half2 two = reinterpret_cast<__half2*>(numbers)[threadIdx.x / 2];
  m.y[threadIdx.x] += __low2float(two);
}

__global__ void bytes_of_a_word(Memory m) {
  __shared__ __align__(4) unsigned char numbers[64];
  numbers[threadIdx.x] = threadIdx.x;
  m.y[threadIdx.x] = numbers[threadIdx.x];
  __syncthreads();
  m.y[threadIdx.x] += reinterpret_cast<unsigned*>(numbers)[threadIdx.x / 4];
}

// Words first, then halves of the same memory, then words again.
__global__ void words_then_halves(Memory m) {
  float* words = dynamic_smem<float>();
  __half* numbers = dynamic_smem<__half>();
  words[threadIdx.x] = m.x[threadIdx.x];
  __syncthreads();
  const float sum = words[63 - threadIdx.x];
  __syncthreads();
  numbers[threadIdx.x] = __float2half(sum);
  __syncthreads();
  m.y[threadIdx.x] = sum + words[threadIdx.x / 2];
}

__global__ void same_half(Memory m) {
  __shared__ __half numbers[64];
  numbers[threadIdx.x] = __float2half(m.x[threadIdx.x]);             // LINE same_half.write
  m.y[threadIdx.x] = __half2float(numbers[(threadIdx.x + 1) % 64]);  // LINE same_half.read
}

// One thread reads the whole word of which two others write the halves.
__global__ void whole_word(Memory m) {
  __shared__ __align__(4) __half numbers[64];
  numbers[threadIdx.x] = __float2half(m.x[threadIdx.x]);  // LINE whole_word.write
  if (threadIdx.x % 2 == 0) {
    const __half2 two =
        reinterpret_cast<__half2*>(numbers)[threadIdx.x / 2];  // LINE whole_word.read
    m.y[threadIdx.x] = __low2float(two);
  } else {
    m.y[threadIdx.x] = 0.0f;
  }
}

__global__ void halves_of_a_global_word(Memory m) {
  __half* numbers = reinterpret_cast<__half*>(m.y);
  numbers[threadIdx.x] = __float2half(m.x[threadIdx.x]);
}

// ---------------------------------------------------------------- blocks

__global__ void blocks_write(Memory m) {
  m.y[threadIdx.x] = float(blockIdx.x);  // LINE blocks_write
}

__global__ void blocks_write_their_own(Memory m) {
  m.y[blockIdx.x * blockDim.x + threadIdx.x] = float(blockIdx.x);
}

__global__ void blocks_write_and_read(Memory m) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  m.scratch[i] = m.x[i];              // LINE blocks_write_and_read.write
  m.y[i] = m.scratch[(i + 16) % 32];  // LINE blocks_write_and_read.read
}

__global__ void blocks_read(Memory m) {
  m.y[blockIdx.x * blockDim.x + threadIdx.x] = m.x[threadIdx.x];
}

__global__ void block_writes_others_add(Memory m) {
  if (blockIdx.x == 1) {
    m.y[threadIdx.x] = 0.0f;  // LINE block_writes_others_add.write
  } else {
    atomicAdd(m.y + threadIdx.x, 1.0f);  // LINE block_writes_others_add.add
  }
}

__global__ void block_reads_others_add(Memory m) {
  if (blockIdx.x == 1) {
    m.scratch[threadIdx.x] = m.y[threadIdx.x];  // LINE block_reads_others_add.read
  } else {
    atomicAdd(m.y + threadIdx.x, 1.0f);  // LINE block_reads_others_add.add
  }
}

__global__ void blocks_add(Memory m) {
  atomicAdd(m.y + threadIdx.x, 1.0f);
}

// Whichever block is the last, another one has added.
__global__ void blocks_add_and_one_writes(Memory m) {
  atomicAdd(m.y + threadIdx.x, 1.0f);            // LINE blocks_add_and_one_writes.add
  if (blockIdx.x == 2) m.y[threadIdx.x] = 0.0f;  // LINE blocks_add_and_one_writes.write
}

// A launch reads what the one before wrote in another block.
__global__ void blocks_of_two_launches(Memory m) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (m.turn == 0) {
    m.scratch[i] = m.x[i];
  } else {
    m.y[i] = m.scratch[(i + 16) % 32];
    m.scratch[(i + 16) % 32] = 0.0f;
  }
}

const Case kCases[] = {
    CASE(write_read_far, 1, 64),
    CASE(write_read_near, 1, 64),
    CASE(write_barrier_read, 1, 64),
    CASE(write_syncwarp_read_near, 1, 64),
    CASE(write_syncwarp_read_far, 1, 64),
    CASE(write_shuffle_read, 1, 64),
    CASE(write_vote_read, 1, 64),
    CASE(write_counting_barrier_read, 1, 64),
    CASE(half_warp_within, 1, 64),
    CASE(half_warp_across, 1, 64),
    CASE(order_is_passed_on, 1, 32),
    CASE(read_write, 1, 64),
    CASE(read_barrier_write, 1, 64),
    CASE(write_write, 1, 64, 128),
    CASE(one_of_two_writes, 1, 64, 128),
    CASE(write_read_global, 1, 32),
    CASE(write_barrier_read_global, 1, 32),
    CASE(adds_to_shared, 1, 64),
    CASE(adds_and_writes_shared, 1, 64),
    CASE(adds_and_reads_shared, 1, 64),
    CASE(halves_of_a_word, 1, 64),
    CASE(bytes_of_a_word, 1, 64),
    CASE(words_then_halves, 1, 64, 256),
    CASE(same_half, 1, 64),
    CASE(whole_word, 1, 64),
    CASE(halves_of_a_global_word, 1, 64),
    CASE(blocks_write, 2, 32),
    CASE(blocks_write_their_own, 2, 32),
    CASE(blocks_write_and_read, 2, 16),
    CASE(blocks_read, 2, 32),
    CASE(block_writes_others_add, 3, 32, 0, 32),
    CASE(block_reads_others_add, 3, 32, 0, 32),
    CASE(blocks_add_and_one_writes, 3, 32, 0, 32),
    CASE(blocks_add, 3, 32, 0, 32),
    CASE(blocks_of_two_launches, 2, 16, 0, 0, 2),
};

}  // namespace

extern "C" const char* run(const char* name, const Memory* memory) {
  return run_case(kCases, name, *memory);
}
