// Kernels whose traffic is known: how many requests, lanes, bytes, sectors and passes over the banks each line
// makes.
#include "common/cuda/async_copy.h"
#include "common/cuda/barrier.h"
#include "common/cuda/reduce.h"
#include "common/cuda/tensor_core.h"
#include "program.h"

namespace {

constexpr unsigned kFullMask = 0xffffffffu;

__device__ int thread_of_grid() {
  return blockIdx.x * blockDim.x + threadIdx.x;
}

// ---------------------------------------------------------------- global memory

__global__ void coalesced(Memory m) {
  const int i = thread_of_grid();
  const float value = m.x[i];  // LINE coalesced.read
  m.y[i] = value;              // LINE coalesced.write
}

__global__ void patterns(Memory m) {
  const int i = threadIdx.x;
  float sum = m.x[2 * i];  // LINE stride_2
  sum += m.x[8 * i];       // LINE scattered
  sum += m.x[i + 1];       // LINE shifted
  sum += m.x[7];           // LINE broadcast
  sum += m.x[31 - i];      // LINE reversed
  sum += m.x[i / 8 * 64];  // LINE by_eights
  sum += __ldg(m.x + i);   // LINE ldg
  m.y[i] = sum;            // LINE patterns.end
}

__global__ void wide(Memory m) {
  const int i = threadIdx.x;
  const float4 four = reinterpret_cast<const float4*>(m.x)[i];           // LINE float4.read
  const float2 two = reinterpret_cast<const float2*>(m.x)[i];            // LINE float2.read
  reinterpret_cast<float4*>(m.y)[i] = make_float4(four.x, two.x, 0, 0);  // LINE float4.write
}

// Hints change no traffic.
__global__ void cache_hints(Memory m) {
  const int i = threadIdx.x;
  float sum = __ldca(m.x + i);                                           // LINE ldca
  sum += __ldcg(m.x + 32 + i);                                           // LINE ldcg
  sum += __ldcs(m.x + 64 + i);                                           // LINE ldcs
  sum += __ldlu(m.x + 96 + i);                                           // LINE ldlu
  sum += __ldcv(m.x + 128 + i);                                          // LINE ldcv
  const float4 four = __ldcs(reinterpret_cast<const float4*>(m.x) + i);  // LINE ldcs4
  __stwb(m.y + i, sum);                                                  // LINE stwb
  __stcg(m.y + 32 + i, four.x);                                          // LINE stcg
  __stwt(m.y + 64 + i, four.y);                                          // LINE stwt
  __stcs(reinterpret_cast<float4*>(m.y) + 32 + i, four);                 // LINE stcs4
}

__global__ void narrow(Memory m) {
  const int i = threadIdx.x;
  const __half* halves = reinterpret_cast<const __half*>(m.x);
  const __half one = halves[i];                                               // LINE half.read
  const __half shifted = halves[i + 1];                                       // LINE half.shifted
  const __half2 two = reinterpret_cast<const __half2*>(halves)[i];            // LINE half2.read
  const unsigned char byte = reinterpret_cast<const unsigned char*>(m.x)[i];  // LINE byte.read
  __half* to = reinterpret_cast<__half*>(m.y);
  to[i] = __hadd(one, shifted);                           // LINE half.write
  reinterpret_cast<__half2*>(to)[32 + i] = two;           // LINE half2.write
  reinterpret_cast<unsigned char*>(m.y)[256 + i] = byte;  // LINE byte.write
}

// Structs go by their members.
__global__ void structs(Memory m) {
  const float3* from = reinterpret_cast<const float3*>(m.x);
  float3* to = reinterpret_cast<float3*>(m.y);
  to[threadIdx.x] = from[threadIdx.x];  // LINE structs
}

__global__ void adds(Memory m) {
  const int i = threadIdx.x;
  atomicAdd(m.y + i, 1.0f);     // LINE add.each
  atomicAdd(m.y + 32, m.x[i]);  // LINE add.one
  __half2* halves = reinterpret_cast<__half2*>(m.y + 64);
  atomicAdd(halves + i, __floats2half2_rn(1.0f, 2.0f));  // LINE add.half2
}

// Nothing stands behind the atomic, so that a compiler could jump to it instead of calling it.
__global__ void only_adds(Memory m) {
  atomicAdd(m.y, 1.0f);  // LINE only_add
}

__global__ void copies_memory(Memory m) {
  if (threadIdx.x == 0) std::memcpy(m.y, m.x, 100 * sizeof(float));     // LINE memcpy
  if (threadIdx.x == 1) std::memset(m.y + 100, 0, 28 * sizeof(float));  // LINE memset
}

// ---------------------------------------------------------------- control flow

__global__ void branches(Memory m) {
  const int i = threadIdx.x;
  float value;
  if (i < 16) {
    value = m.x[i];  // LINE branch.one
  } else {
    value = m.x[2 * i] + 1.0f;  // LINE branch.other
  }
  m.y[i] = value;  // LINE branch.end
}

__global__ void ragged(Memory m) {
  for (int i = thread_of_grid(); i < m.n; i += gridDim.x * blockDim.x) {
    m.y[i] = m.x[i];  // LINE ragged
  }
}

// Lane i goes around i + 1 times.
__global__ void triangle(Memory m) {
  float sum = 0.0f;
  for (int k = 0; k <= int(threadIdx.x); ++k) {
    sum += m.x[k];  // LINE triangle.loop
  }
  m.y[threadIdx.x] = sum;  // LINE triangle.end
}

__global__ void nested(Memory m) {
  const int i = threadIdx.x;
  float sum = 0.0f;
  for (int row = 0; row < 4; ++row) {
    for (int k = 0; k < i % 4; ++k) {
      sum += m.x[row * 32 + k];  // LINE nested.inner
    }
    sum += m.x[row * 32 + i];  // LINE nested.outer
  }
  m.y[i] = sum;  // LINE nested.end
}

// The last thing in a loop is a store by some lanes: they all begin the next turn together.
__global__ void guarded_store(Memory m) {
  float* s = dynamic_smem<float>();
  for (int i = threadIdx.x; i < 128; i += 32) {
    const int row = i / 8, col = i % 8;
    float sum = 0.0f;
    for (int k = 0; k < 4; ++k) {
      sum += m.x[row * 4 + k];  // LINE guarded_store.inner
    }
    s[i] = sum;  // LINE guarded_store.all
    const float scaled = row < m.n - 4090 ? 2.0f * sum : 0.0f;
    if (row < m.n - 4086 && col < 5) {
      m.y[i] = scaled;  // LINE guarded_store.some
    }
  }
}

// Lanes that return early have read together with the others, and then do not shuffle.
__global__ void returns_early(Memory m) {
  const int i = threadIdx.x;
  const float value = m.x[i];  // LINE returns_early.read
  m.y[i] = value;              // LINE returns_early.write
  if (i >= 20) return;
  const float other = __shfl_down_sync(kFullMask, value, 1, 4);
  m.y[i] = other;  // LINE returns_early.rest
}

// What a compiler would like to keep in a register, or to read once.
__global__ void invariants(Memory m) {
  float* s = dynamic_smem<float>();
  const int i = threadIdx.x;
  s[i] = 0.0f;  // LINE invariants.start
  float sum = 0.0f;
  for (int k = 0; k < 10; ++k) {
    sum += m.x[i] * k;  // LINE invariants.read
    s[i] += sum;        // LINE invariants.update
  }
  for (int k = 0; k < 4; ++k) {
    m.y[i] += s[i];  // LINE invariants.sum
  }
}

__global__ void rereads(Memory m) {
  const int i = thread_of_grid();
  float sum = 0.0f;
  for (int k = 0; k < 50; ++k) sum += m.x[k];  // LINE rereads
  m.y[i] = sum;                                // LINE rereads.end
}

// ---------------------------------------------------------------- shared memory

__global__ void banks(Memory m) {
  float* s = dynamic_smem<float>();
  const int i = threadIdx.x;
  for (int k = i; k < 33 * 32; k += 32) {
    s[k] = m.x[i];  // LINE banks.fill
  }
  __syncthreads();
  float sum = s[i];                                     // LINE banks.each
  sum += s[2 * i];                                      // LINE banks.two
  sum += s[32 * i];                                     // LINE banks.same
  sum += s[33 * i];                                     // LINE banks.padded
  sum += s[5];                                          // LINE banks.broadcast
  const float2 two = reinterpret_cast<float2*>(s)[i];   // LINE banks.float2
  const float4 four = reinterpret_cast<float4*>(s)[i];  // LINE banks.float4
  const __half* halves = dynamic_smem<__half>();
  const __half one = halves[i];         // LINE banks.half
  const __half other = halves[64 * i];  // LINE banks.half_same
  sum += __half2float(one) + __half2float(other);
  if (i % 2 == 0) {
    const float2 even = reinterpret_cast<float2*>(s)[i / 2];  // LINE banks.float2_even
    sum += even.x;
  }
  m.y[i] = sum + two.y + four.z;  // LINE banks.end
}

__global__ void static_bytes(Memory m) {
  __shared__ float tile[32][33];
  __shared__ double wide[32];
  const int i = threadIdx.x;
  const float value = m.x[i];  // LINE static.read
  tile[i][0] = value;          // LINE static.column_write
  wide[i] = value;             // LINE static.double
  __syncthreads();
  m.y[i] = tile[0][0] + float(wide[31 - i]);  // LINE static.end
}

__global__ void shared_adds(Memory m) {
  __shared__ float sums[32];
  const int i = threadIdx.x;
  sums[i] = 0.0f;  // LINE shared_adds.start
  __syncthreads();
  atomicAdd(&sums[i / 8], m.x[i]);  // LINE shared_adds
  __syncthreads();
  m.y[i] = sums[i / 8];  // LINE shared_adds.end
}

// ---------------------------------------------------------------- barriers

__global__ void barriers(Memory m) {
  for (int i = 0; i < 5; ++i) {
    __syncthreads();  // LINE barriers.block
    __syncwarp();     // LINE barriers.warp
  }
  if (threadIdx.x < 32) __syncwarp();                     // LINE barriers.one_warp
  m.y[thread_of_grid()] = float(__syncthreads_count(1));  // LINE barriers.count
}

// ---------------------------------------------------------------- more accesses than a log holds

// Lane i of warp w goes around 3000 + 50 i + w times; no barrier lets the logs be emptied.
__global__ void long_loops(Memory m) {
  float* s = dynamic_smem<float>();
  const int i = threadIdx.x, lane = i % 32;
  s[i] = 0.0f;  // LINE long_loops.start
  const int turns = 3000 + 50 * lane + i / 32;
  float sum = 0.0f;
  for (int k = 0; k < turns; ++k) {
    sum += m.x[k % 64];  // LINE long_loops.global
    s[i] += sum;         // LINE long_loops.shared
  }
  __syncthreads();
  m.y[i] = s[i];  // LINE long_loops.end
}

// Every other lane makes twice as many accesses, and runs out of space sooner.
__global__ void uneven_loops(Memory m) {
  const int i = threadIdx.x;
  float sum = 0.0f;
  for (int k = 0; k < 5000; ++k) {
    sum += m.x[k % 64];  // LINE uneven_loops.all
    if (i % 2 == 1) {
      sum += m.x[k % 64 + 1];  // LINE uneven_loops.odd
    }
  }
  m.y[i] = sum;  // LINE uneven_loops.end
}

// One lane alone makes more accesses than a log holds, then meets the others.
__global__ void one_long_loop(Memory m) {
  const int i = threadIdx.x;
  float sum = 0.0f;
  if (i == 5) {
    for (int k = 0; k < 9000; ++k) {
      sum += m.x[k % 64];  // LINE one_long_loop
    }
  }
  sum += __shfl_sync(kFullMask, sum, 5);
  m.y[i] = sum;  // LINE one_long_loop.end
}

// ---------------------------------------------------------------- what tensor core kernels do

// Rows of 128 bytes, and of 144.
__global__ void matrices(Memory m) {
  const int lane = threadIdx.x;
  for (int i = lane; i < 288; i += 32) {
    dynamic_smem<float4>()[i] = make_float4(1.0f, 2.0f, 3.0f, 4.0f);  // LINE matrices.fill
  }
  __syncwarp();
  __half* numbers = dynamic_smem<__half>();
  uint32_t four[4], two[2], one[1];
  ldmatrix<4>(four, numbers + 64 * lane);  // LINE matrices.conflicts
  float sum = static_cast<float>(four[0]);
  ldmatrix<4>(four, numbers + 72 * lane);       // LINE matrices.padded
  ldmatrix_trans<2>(two, numbers + 64 * lane);  // LINE matrices.two
  ldmatrix<1>(one, numbers + 72 * lane);        // LINE matrices.one
  sum += static_cast<float>(four[1] + two[1] + one[0]);
  __syncwarp();
  stmatrix<4>(numbers + 72 * lane, four);  // LINE matrices.store
  stmatrix<1>(numbers + 64 * lane, one);   // LINE matrices.store_one
  float c[4] = {sum, sum, sum, sum};
  mma<__half>(c, four, one[0], two[0]);
  m.y[lane] = c[0];  // LINE matrices.end
}

// What is outside is not read, but zeros are written. 64 threads.
__global__ void copies(Memory m) {
  __shared__ __align__(16) float tile[2][256];
  const int first = 4 * threadIdx.x;
  for (int i = 0; i < 2; ++i) {
    cp_async_16(tile[i] + first, m.x + 256 * i + first, threadIdx.x < 40);  // LINE copies
    cp_async_commit();
  }
  cp_async_wait<0>();
  __syncthreads();
  m.y[threadIdx.x] = tile[1][first];  // LINE copies.end
}

__global__ void vector_adds(Memory m) {
  const float x[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  reduce_add(m.y + 4 * threadIdx.x, x);              // LINE vector_adds.each
  reduce_add(m.y + 128 + 4 * (threadIdx.x / 8), x);  // LINE vector_adds.same
}

__global__ void named_barriers(Memory m) {
  for (int i = 0; i < 3; ++i) {
    if (threadIdx.x < 64) barrier_sync(1, 64);  // LINE named_barriers.part
    if (threadIdx.x < 32) {
      barrier_sync(2, 96);  // LINE named_barriers.whole
    } else {
      barrier_sync(2, 96);
    }
  }
  m.y[thread_of_grid()] = 1.0f;  // LINE named_barriers.end
}

const Case kCases[] = {
    CASE(coalesced, 3, 64),
    CASE(patterns, 1, 32),
    CASE(wide, 1, 32),
    CASE(cache_hints, 1, 32),
    CASE(narrow, 1, 32),
    CASE(structs, 1, 32),
    CASE(adds, 2, 32, 0, 96),
    CASE(only_adds, 2, 64, 0, 1),
    CASE(copies_memory, 1, 32),
    CASE(branches, 1, 32),
    CASE(ragged, 2, 64),
    CASE(triangle, 1, 32),
    CASE(nested, 1, 32),
    CASE(guarded_store, 1, 32, 512),
    CASE(returns_early, 1, 32),
    CASE(invariants, 1, 32, 128, 32),
    CASE(rereads, 2, 32),
    CASE(banks, 1, 32, 33 * 32 * sizeof(float)),
    CASE(static_bytes, 1, 32),
    CASE(shared_adds, 1, 32),
    CASE(barriers, 3, 64),
    CASE(long_loops, 1, 64, 256),
    CASE(uneven_loops, 1, 32),
    CASE(one_long_loop, 1, 32),
    CASE(matrices, 1, 32, 4608),
    CASE(copies, 1, 64),
    CASE(vector_adds, 1, 32, 0, 144),
    CASE(named_barriers, 2, 96),
};

}  // namespace

// Host code, which a checked build announces like a kernel's.
extern "C" float host_sum(const float* values, int n) {
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum += values[i];
  return sum;
}

extern "C" const char* run(const char* name, const Memory* memory) {
  return run_case(kCases, name, *memory);
}
