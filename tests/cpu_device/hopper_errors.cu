// Needs compute capability 9.0.
//
// Barriers, copies and products that are used wrongly, each kernel in its own way. Usage and output are those of
// errors.cu: only the CPU device is meant to run this, and the tests look up line numbers by `// LINE name`.
#include "common/cuda/tensor_map.h"
#include "common/cuda/wgmma.h"
#include "program.h"

struct Shared {
  alignas(1024) __half panel[64 * kPanelColumns];
  MBarrier barrier;
};

__device__ Shared& shared_with_barrier(int num_arrivals) {
  Shared& shared = *dynamic_smem<Shared>();
  if (threadIdx.x == 0) mbarrier_init(&shared.barrier, num_arrivals);
  mbarrier_init_fence();
  __syncthreads();
  return shared;
}

__global__ void no_init() {
  mbarrier_wait(&dynamic_smem<Shared>()->barrier, 0);  // LINE no_init
}

// One of two arrivals.
__global__ void arrival_missing() {
  Shared& shared = shared_with_barrier(2);
  if (threadIdx.x == 0) mbarrier_arrive(&shared.barrier);
  mbarrier_wait(&shared.barrier, 0);  // LINE arrival_missing
}

// 48 bytes of 64.
__global__ void bytes_missing(const float* source) {
  Shared& shared = shared_with_barrier(1);
  if (threadIdx.x == 0) {
    mbarrier_expect(&shared.barrier, 64);
    bulk_load(shared.panel, source, 48, &shared.barrier);
  }
  mbarrier_wait(&shared.barrier, 0);  // LINE bytes_missing
}

__global__ void too_many_bytes(const float* source) {
  Shared& shared = shared_with_barrier(1);
  if (threadIdx.x == 0) {
    mbarrier_expect(&shared.barrier, 64);
    bulk_load(shared.panel, source, 80, &shared.barrier);  // LINE too_many_bytes
  }
}

// The second phase cannot begin before the bytes of the first are there.
__global__ void arrives_too_often(const float*) {
  Shared& shared = shared_with_barrier(1);
  if (threadIdx.x == 0) {
    mbarrier_expect(&shared.barrier, 64);
    mbarrier_arrive(&shared.barrier);  // LINE arrives_too_often
  }
}

__global__ void no_fence() {
  Shared& shared = *dynamic_smem<Shared>();
  const SharedMatrix matrix = shared_matrix(shared.panel, 0);
  float d[32];
  wgmma_fence(d);
  wgmma<__half, Major::k, Major::k>(d, matrix, 0, matrix, 0, false);
  wgmma_commit();
  wgmma_wait<0>(d);
  wgmma<__half, Major::k, Major::k>(d, matrix, 0, matrix, 0, true);  // LINE no_fence
}

// Each warp multiplies its own matrix.
__global__ void different_matrices() {
  Shared& shared = *dynamic_smem<Shared>();
  const SharedMatrix matrix = shared_matrix(shared.panel + threadIdx.x / 32 * 16, 0);
  float d[32];
  wgmma_fence(d);
  wgmma<__half, Major::k, Major::k>(d, matrix, 0, matrix, 0, false);  // LINE different_matrices
}

// Three warps of four.
__global__ void warp_missing() {
  if (threadIdx.x < 96) wgmma_commit();  // LINE warp_missing
}

cudaError_t run_wrong(const std::string& name, const float* source) {
  const dim3 one(1), block(128);
  const size_t bytes = sizeof(Shared);
  if (name == "no_init") return launch(no_init, one, block, bytes, nullptr);
  if (name == "arrival_missing") return launch(arrival_missing, one, block, bytes, nullptr);
  if (name == "bytes_missing") return launch(bytes_missing, one, block, bytes, nullptr, source);
  if (name == "too_many_bytes") return launch(too_many_bytes, one, block, bytes, nullptr, source);
  if (name == "arrives_too_often") {
    return launch(arrives_too_often, one, block, bytes, nullptr, source);
  }
  if (name == "no_fence") return launch(no_fence, one, block, bytes, nullptr);
  if (name == "different_matrices") return launch(different_matrices, one, block, bytes, nullptr);
  if (name == "warp_missing") return launch(warp_missing, one, block, bytes, nullptr);
  std::fprintf(stderr, "no case %s\n", name.c_str());
  std::exit(2);
}

int main(int argc, char** argv) {
  use_schedule_of_environment();
  DeviceArray<float> source(std::vector<float>(64, 1.0f));
  for (int i = 1; i < argc; ++i) {
    const cudaError_t error = run_wrong(argv[i], source.data());
    std::printf("%s: %s %s\n", argv[i], cudaGetErrorName(error), launch_error.c_str());
    launch_error.clear();
  }
}
