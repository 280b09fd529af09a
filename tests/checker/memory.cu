// Accesses outside of every tensor (memcheck), and reads of what nothing has written (initcheck). Beside each
// mistake stands a kernel that does the same correctly.
#include "program.h"

namespace {

constexpr unsigned kFullMask = 0xffffffffu;
constexpr int kPitch = 12;  // of x where it has rows: 8 elements, then a gap

// ---------------------------------------------------------------- global memory

__global__ void copies(Memory m) {
  m.y[threadIdx.x] = m.x[threadIdx.x];
}

__global__ void reads_before_start(Memory m) {
  const int i = threadIdx.x;
  m.y[i] = m.x[i - 1];  // LINE reads_before_start
}

__global__ void reads_past_end(Memory m) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  m.y[i] = m.x[i + 1];  // LINE reads_past_end
}

__global__ void reads_far_past_end(Memory m) {
  const int i = threadIdx.x;
  m.y[i] = i == 7 ? m.x[m.n + 100] : 0.0f;  // LINE reads_far_past_end
}

__global__ void writes_before_start(Memory m) {
  const int i = threadIdx.x;
  m.y[i] = 1.0f;
  if (i == 3) m.y[-2] = 2.0f;  // LINE writes_before_start
}

__global__ void writes_past_end(Memory m) {
  const int i = threadIdx.x;
  m.y[i] = 1.0f;
  if (i == 3) m.y[32] = 2.0f;  // LINE writes_past_end
}

__global__ void adds_past_end(Memory m) {
  atomicAdd(m.y + threadIdx.x + 1, 1.0f);  // LINE adds_past_end
}

__global__ void adds(Memory m) {
  atomicAdd(m.y + threadIdx.x, 1.0f);
}

// A float4 of which the last two elements are not the tensor's.
__global__ void reads_across_end(Memory m) {
  const int i = threadIdx.x;
  m.y[i] = 0.0f;
  if (i == 5) {
    const float4 v = *reinterpret_cast<const float4*>(m.x + 28);  // LINE reads_across_end
    m.y[i] = v.x;
  }
}

__global__ void reads_rows(Memory m) {
  const int row = threadIdx.x / 8, col = threadIdx.x % 8;
  m.y[threadIdx.x] = m.x[row * kPitch + col];
}

__global__ void reads_between_rows(Memory m) {
  const int row = threadIdx.x / 8, col = threadIdx.x % 8;
  m.y[threadIdx.x] = m.x[row * kPitch + col + (row == 1)];  // LINE reads_between_rows
}

__global__ void fills_parts(Memory m) {
  m.scratch[threadIdx.x] = 1.0f;
  m.second_part[threadIdx.x] = 2.0f;
  m.y[threadIdx.x] = m.scratch[threadIdx.x] + m.second_part[threadIdx.x];
}

__global__ void writes_past_part(Memory m) {
  m.scratch[threadIdx.x + 1] = 1.0f;  // LINE writes_past_part
  m.y[threadIdx.x] = 1.0f;
}

__global__ void writes_input(Memory m) {
  m.y[threadIdx.x] = 0.0f;
  if (threadIdx.x == 9) const_cast<float*>(m.x)[6] = 0.0f;  // LINE writes_input
}

__global__ void adds_to_input(Memory m) {
  m.y[threadIdx.x] = 0.0f;
  if (threadIdx.x == 9) atomicAdd(const_cast<float*>(m.x) + 6, 1.0f);  // LINE adds_to_input
}

__global__ void reads_wild(Memory m) {
  const float* wild = m.n == 0 ? m.x : reinterpret_cast<const float*>(0x10);
  m.y[threadIdx.x] = threadIdx.x == 2 ? *wild : 0.0f;  // LINE reads_wild
}

__global__ void writes_wild(Memory m) {
  float* wild = m.n == 0 ? m.y : reinterpret_cast<float*>(0x10);
  if (threadIdx.x == 2) *wild = 1.0f;  // LINE writes_wild
}

__global__ void adds_wild(Memory m) {
  float* wild = m.n == 0 ? m.y : reinterpret_cast<float*>(0x10);
  if (threadIdx.x == 2) atomicAdd(wild, 1.0f);  // LINE adds_wild
}

__global__ void reads_null(Memory m) {
  const float* null = m.n == 0 ? m.x : nullptr;
  m.y[threadIdx.x] = threadIdx.x == 2 ? null[0] : 0.0f;  // LINE reads_null
}

// A pointer to another thread's local variable means nothing.
__global__ void reads_local_of_other(Memory m) {
  __shared__ float* where;
  float local = m.x[threadIdx.x];
  if (threadIdx.x == 0) where = &local;
  __syncthreads();
  m.y[threadIdx.x] = *where;  // LINE reads_local_of_other
  __syncthreads();
}

// ---------------------------------------------------------------- shared memory

__global__ void dynamic_shared(Memory m) {
  float* s = dynamic_smem<float>();
  s[threadIdx.x] = m.x[threadIdx.x];
  m.y[threadIdx.x] = s[threadIdx.x];
}

__global__ void reads_past_dynamic_shared(Memory m) {
  float* s = dynamic_smem<float>();
  s[threadIdx.x] = m.x[threadIdx.x];
  __syncthreads();
  m.y[threadIdx.x] = s[threadIdx.x + 1];  // LINE reads_past_dynamic_shared
}

__global__ void writes_past_dynamic_shared(Memory m) {
  float* s = dynamic_smem<float>();
  s[threadIdx.x + 8] = m.x[threadIdx.x];  // LINE writes_past_dynamic_shared
  m.y[threadIdx.x] = 0.0f;
}

// The last bytes that a block could ever have.
__global__ void writes_past_all_shared(Memory m) {
  float* s = dynamic_smem<float>();
  if (threadIdx.x == 4) s[227 * 1024 / 4] = 1.0f;  // LINE writes_past_all_shared
  m.y[threadIdx.x] = 0.0f;
}

__global__ void static_shared(Memory m) {
  __shared__ float tile[4][8];
  const int row = threadIdx.x / 8, col = threadIdx.x % 8;
  tile[row][col] = m.x[threadIdx.x];
  m.y[threadIdx.x] = tile[row][col];
}

__global__ void reads_past_static_shared(Memory m) {
  __shared__ float table[32];
  table[threadIdx.x] = m.x[threadIdx.x];
  __syncthreads();
  m.y[threadIdx.x] = table[threadIdx.x + 1];  // LINE reads_past_static_shared
}

__global__ void writes_past_static_shared(Memory m) {
  __shared__ float sums[32];
  sums[threadIdx.x] = 0.0f;
  if (threadIdx.x == 3) sums[m.n] = 1.0f;  // LINE writes_past_static_shared
  m.y[threadIdx.x] = sums[threadIdx.x];
}

__global__ void writes_before_static_shared(Memory m) {
  __shared__ float first[32];
  first[threadIdx.x] = 0.0f;
  if (threadIdx.x == 1) first[-m.n] = 1.0f;  // LINE writes_before_static_shared
  m.y[threadIdx.x] = first[threadIdx.x];
}

// ---------------------------------------------------------------- alignment

__global__ void aligned(Memory m) {
  float4* s = dynamic_smem<float4>();
  s[threadIdx.x] = reinterpret_cast<const float4*>(m.x)[threadIdx.x];
  m.y[threadIdx.x] = s[threadIdx.x].x;
}

__global__ void misaligned_global(Memory m) {
  const int i = threadIdx.x;
  m.y[i] = 0.0f;
  if (i == 1) {
    const float4 v = *reinterpret_cast<const float4*>(m.x + 6);  // LINE misaligned_global
    m.y[i] = v.x;
  }
}

__global__ void misaligned_double(Memory m) {
  const int i = threadIdx.x;
  m.y[i] = i == 1 ? float(*reinterpret_cast<const double*>(m.x + 5)) : 0;  // LINE misaligned_double
}

__global__ void misaligned_dynamic_shared(Memory m) {
  float* s = dynamic_smem<float>();
  s[threadIdx.x] = m.x[threadIdx.x];
  __syncthreads();
  m.y[threadIdx.x] = 0.0f;
  if (threadIdx.x == 1) {
    const float2 v = *reinterpret_cast<float2*>(s + 3);  // LINE misaligned_dynamic_shared
    m.y[threadIdx.x] = v.x;
  }
}

__global__ void misaligned_static_shared(Memory m) {
  __shared__ __align__(16) float row[32];
  row[threadIdx.x] = m.x[threadIdx.x];
  __syncthreads();
  m.y[threadIdx.x] = 0.0f;
  if (threadIdx.x == 1) {
    const float4 v = *reinterpret_cast<float4*>(row + 3);  // LINE misaligned_static_shared
    m.y[threadIdx.x] = v.x;
  }
}

// Structs that are not vectors need the alignment of their members only.
struct Pair {
  float first, second;
};
struct Wide {
  double first, second;
};

__global__ void copies_structs(Memory m) {
  __shared__ Wide wide[33];
  const Pair* pairs = reinterpret_cast<const Pair*>(m.x + 1);
  const float3* triples = reinterpret_cast<const float3*>(m.x + 1);
  const Pair pair = pairs[threadIdx.x % 8];
  const float3 triple = triples[threadIdx.x % 8];
  wide[threadIdx.x] = {pair.first, pair.second};
  __syncthreads();
  Wide* shifted = reinterpret_cast<Wide*>(&wide[0].second);
  const Wide copy = shifted[threadIdx.x / 2];
  m.y[threadIdx.x] = copy.first > 0 ? triple.z : pair.second;
}

// ---------------------------------------------------------------- never written

struct Smem {
  float tile[4][9];
  float sums[4];
};

__global__ void reads_unwritten_dynamic_shared(Memory m) {
  Smem& smem = *dynamic_smem<Smem>();
  if (threadIdx.x < 3) smem.sums[threadIdx.x] = 0.0f;
  __syncthreads();
  m.y[threadIdx.x] = smem.sums[threadIdx.x % 4];  // LINE reads_unwritten_dynamic_shared
}

__global__ void reads_written_dynamic_shared(Memory m) {
  Smem& smem = *dynamic_smem<Smem>();
  if (threadIdx.x < 4) smem.sums[threadIdx.x] = 0.0f;
  __syncthreads();
  m.y[threadIdx.x] = smem.sums[threadIdx.x % 4];
}

// What another block wrote there before is gone.
__global__ void reads_unwritten_by_this_block(Memory m) {
  __shared__ float tile[4][8];
  const int row = threadIdx.x / 8, col = threadIdx.x % 8;
  if (blockIdx.x == 0 || row < 2) tile[row][col] = 1.0f;
  m.y[blockIdx.x * 32 + threadIdx.x] = tile[row][col];  // LINE reads_unwritten_by_this_block
}

__global__ void adds_to_unwritten_shared(Memory m) {
  __shared__ float sum;
  atomicAdd(&sum, m.x[threadIdx.x]);  // LINE adds_to_unwritten_shared
  __syncthreads();
  m.y[threadIdx.x] = sum;
}

__global__ void adds_to_zeroed_shared(Memory m) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.0f;
  __syncthreads();
  atomicAdd(&sum, m.x[threadIdx.x]);
  __syncthreads();
  m.y[threadIdx.x] = sum;
}

// The other half of a word that one 16-bit number was written to.
__global__ void reads_unwritten_half_word(Memory m) {
  __shared__ __half numbers[64];
  numbers[2 * threadIdx.x] = __float2half(1.0f);
  const int odd = threadIdx.x == 6;
  m.y[threadIdx.x] =
      __half2float(numbers[2 * threadIdx.x + odd]);  // LINE reads_unwritten_half_word
}

__global__ void reads_unwritten_scratch(Memory m) {
  if (threadIdx.x != 11) m.second_part[threadIdx.x] = 1.0f;
  m.y[threadIdx.x] = m.second_part[threadIdx.x];  // LINE reads_unwritten_scratch
}

__global__ void adds_to_unwritten(Memory m) {
  atomicAdd(m.y + threadIdx.x, 1.0f);  // LINE adds_to_unwritten
}

__global__ void leaves_outputs_unwritten(Memory m) {
  if (threadIdx.x < 30) m.y[threadIdx.x] = 1.0f;
}

// A warp whose lanes read before one of them writes; __syncwarp orders the two, so it is no race.
__global__ void reads_before_it_is_written(Memory m) {
  __shared__ float value;
  m.y[threadIdx.x] = 0.0f;
  if (threadIdx.x == 1) m.y[1] = value;  // LINE reads_before_it_is_written
  __syncwarp(kFullMask);
  if (threadIdx.x == 2) value = 1.0f;
}

const Case kCases[] = {
    CASE(copies, 1, 32),
    CASE(reads_before_start, 1, 32),
    CASE(reads_past_end, 2, 32),
    CASE(reads_far_past_end, 1, 32),
    CASE(writes_before_start, 1, 32),
    CASE(writes_past_end, 1, 32),
    CASE(adds_past_end, 1, 32, 0, 32),
    CASE(adds, 1, 32, 0, 32),
    CASE(reads_across_end, 1, 32),
    CASE(reads_rows, 1, 32),
    CASE(reads_between_rows, 1, 32),
    CASE(fills_parts, 1, 32),
    CASE(writes_past_part, 1, 32),
    CASE(writes_input, 1, 32),
    CASE(adds_to_input, 1, 32),
    CASE(reads_wild, 1, 32),
    CASE(writes_wild, 1, 32),
    CASE(adds_wild, 1, 32),
    CASE(reads_null, 1, 32),
    CASE(reads_local_of_other, 1, 32),
    CASE(dynamic_shared, 1, 32, 128),
    CASE(reads_past_dynamic_shared, 1, 32, 128),
    CASE(writes_past_dynamic_shared, 1, 32, 128),
    CASE(writes_past_all_shared, 1, 32, 128),
    CASE(static_shared, 1, 32),
    CASE(reads_past_static_shared, 1, 32),
    CASE(writes_past_static_shared, 1, 32),
    CASE(writes_before_static_shared, 1, 32),
    CASE(aligned, 1, 32, 512),
    CASE(misaligned_global, 1, 32),
    CASE(misaligned_double, 1, 32),
    CASE(misaligned_dynamic_shared, 1, 32, 128),
    CASE(misaligned_static_shared, 1, 32),
    CASE(copies_structs, 1, 32),
    CASE(reads_unwritten_dynamic_shared, 1, 32, sizeof(Smem)),
    CASE(reads_written_dynamic_shared, 1, 32, sizeof(Smem)),
    CASE(reads_unwritten_by_this_block, 2, 32),
    CASE(adds_to_unwritten_shared, 1, 32),
    CASE(adds_to_zeroed_shared, 1, 32),
    CASE(reads_unwritten_half_word, 1, 32),
    CASE(reads_unwritten_scratch, 1, 32),
    CASE(adds_to_unwritten, 1, 32),
    CASE(leaves_outputs_unwritten, 1, 32),
    CASE(reads_before_it_is_written, 1, 32),
};

}  // namespace

extern "C" const char* run(const char* name, const Memory* memory) {
  // Not a kernel's mistake but a launcher's.
  if (std::strcmp(name, "zeroes_input") == 0) {
    return cudaMemsetAsync(const_cast<float*>(memory->x), 0, 64, nullptr) ? "refused" : nullptr;
  }
  if (std::strcmp(name, "zeroes_past_end") == 0) {
    return cudaMemsetAsync(memory->y + 16, 0, 32 * 4, nullptr) ? "refused" : nullptr;
  }
  if (std::strcmp(name, "zeroes_outside") == 0) {
    return cudaMemsetAsync(reinterpret_cast<void*>(0x10), 0, 64, nullptr) ? "refused" : nullptr;
  }
  return run_case(kCases, name, *memory);
}
