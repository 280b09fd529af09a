// Needs compute capability 9.0.
//
// Barriers that count bytes, copies in bulk and products of warpgroups. Beside each mistake stands a kernel that does
// the same correctly.
#include "common/cuda/tensor_map.h"
#include "common/cuda/wgmma.h"
#include "program.h"

namespace {

// ---------------------------------------------------------------- copies, by 64 threads

struct Tile {
  alignas(16) float numbers[64];
  MBarrier full, empty;
};

__device__ void init(Tile& tile) {
  if (threadIdx.x == 0) {
    mbarrier_init(&tile.full, 1);
    mbarrier_init(&tile.empty, 32);
    mbarrier_init_fence();
  }
  __syncthreads();
}

__device__ void start(Tile& tile, const float* source) {
  mbarrier_expect(&tile.full, sizeof(tile.numbers));
  bulk_load(tile.numbers, source, sizeof(tile.numbers), &tile.full);  // LINE bulk.copy
}

__global__ void bulk_wait_read(Memory m) {
  __shared__ Tile tile;
  init(tile);
  if (threadIdx.x == 0) start(tile, m.x);
  mbarrier_wait(&tile.full, 0);
  m.y[threadIdx.x] = tile.numbers[63 - threadIdx.x];
}

__global__ void bulk_barrier_read(Memory m) {
  __shared__ Tile tile;
  init(tile);
  if (threadIdx.x == 0) start(tile, m.x);
  __syncthreads();
  m.y[threadIdx.x] = tile.numbers[63 - threadIdx.x];  // LINE bulk_barrier_read.read
}

// The first warp waits and tells the second.
__global__ void bulk_wait_of_one_warp(Memory m) {
  __shared__ Tile tile;
  init(tile);
  if (threadIdx.x == 0) start(tile, m.x);
  if (threadIdx.x < 32) mbarrier_wait(&tile.full, 0);
  __syncthreads();
  m.y[threadIdx.x] = tile.numbers[63 - threadIdx.x];
}

// The first warp waits, and the second does not know.
__global__ void bulk_wait_of_another_warp(Memory m) {
  __shared__ Tile tile;
  init(tile);
  if (threadIdx.x == 0) start(tile, m.x);
  __syncthreads();
  if (threadIdx.x < 32) mbarrier_wait(&tile.full, 0);
  m.y[threadIdx.x] = tile.numbers[63 - threadIdx.x];  // LINE bulk_wait_of_another_warp.read
}

// The second warp reads what the first has copied, and gives it back.
__global__ void bulk_refill(Memory m) {
  __shared__ Tile tile;
  init(tile);
  if (threadIdx.x == 0) {
    start(tile, m.x);
    mbarrier_wait(&tile.empty, 0);
    start(tile, m.x);
  } else if (threadIdx.x >= 32) {
    mbarrier_wait(&tile.full, 0);
    m.y[threadIdx.x] = tile.numbers[threadIdx.x];
    mbarrier_arrive(&tile.empty);
  }
  mbarrier_wait(&tile.full, 1);
}

__global__ void bulk_given_back_too_early(Memory m) {
  __shared__ Tile tile;
  init(tile);
  if (threadIdx.x == 0) {
    start(tile, m.x);
    mbarrier_wait(&tile.empty, 0);
    start(tile, m.x);
  } else if (threadIdx.x >= 32) {
    mbarrier_wait(&tile.full, 0);
    mbarrier_arrive(&tile.empty);
    m.y[threadIdx.x] = tile.numbers[threadIdx.x];  // LINE bulk_given_back_too_early.read
  }
}

__global__ void bulk_past_end(Memory m) {
  __shared__ Tile tile;
  init(tile);
  if (threadIdx.x == 0) start(tile, m.x + 16);
  mbarrier_wait(&tile.full, 0);
}

// ---------------------------------------------------------------- products, by 128 threads

__device__ uint4* fill_panel(uint32_t bits) {
  uint4* chunks = dynamic_smem<uint4>();
  for (int i = threadIdx.x; i < 512; i += 128) {
    chunks[i] = make_uint4(bits, bits, bits, bits);  // LINE panel.write
  }
  return chunks;
}

// The panel times itself.
__device__ void issue(float (&d)[32], const uint4* chunks) {
  const SharedMatrix matrix = shared_matrix(chunks, 0);
  wgmma_fence(d);
  wgmma<__half, Major::k, Major::k>(d, matrix, 0, matrix, 0, false);  // LINE product.read
  wgmma_commit();
}

__global__ void product(Memory m) {
  const uint4* chunks = fill_panel(0x3c003c00);
  fence_async_proxy();
  __syncthreads();
  float d[32];
  issue(d, chunks);
  wgmma_wait<0>(d);
  m.y[threadIdx.x] = d[0];
}

__global__ void product_without_proxy_fence(Memory m) {
  const uint4* chunks = fill_panel(0x3c003c00);
  __syncthreads();
  float d[32];
  issue(d, chunks);
  wgmma_wait<0>(d);
  m.y[threadIdx.x] = d[0];
}

__global__ void product_then_write(Memory m) {
  uint4* chunks = fill_panel(0x3c003c00);
  fence_async_proxy();
  __syncthreads();
  float d[32];
  issue(d, chunks);
  wgmma_wait<0>(d);
  __syncthreads();
  chunks[threadIdx.x] = make_uint4(0, 0, 0, 0);
  m.y[threadIdx.x] = d[0];
}

// The barrier comes before the product is complete.
__global__ void product_overwritten(Memory m) {
  uint4* chunks = fill_panel(0x3c003c00);
  fence_async_proxy();
  __syncthreads();
  float d[32];
  issue(d, chunks);
  __syncthreads();
  chunks[127 - threadIdx.x] = make_uint4(0, 0, 0, 0);  // LINE product_overwritten.write
  wgmma_wait<0>(d);
  m.y[threadIdx.x] = d[0];
}

constexpr Case kCases[] = {
    CASE(bulk_wait_read, 1, 64),
    CASE(bulk_barrier_read, 1, 64),
    CASE(bulk_wait_of_one_warp, 1, 64),
    CASE(bulk_wait_of_another_warp, 1, 64),
    CASE(bulk_refill, 1, 64),
    CASE(bulk_given_back_too_early, 1, 64),
    CASE(bulk_past_end, 1, 64),
    CASE(product, 1, 128, 8192),
    CASE(product_without_proxy_fence, 1, 128, 8192),
    CASE(product_then_write, 1, 128, 8192),
    CASE(product_overwritten, 1, 128, 8192),
};

}  // namespace

extern "C" const char* run(const char* name, const Memory* memory) {
  return run_case(kCases, name, *memory);
}
