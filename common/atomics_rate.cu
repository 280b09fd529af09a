// How fast a GPU adds to memory, against plain stores: a program for common/experiments.py, not a chapter.
//
// Every thread of a warp takes the next element, as the chapters' dQ products do, so that a warp touches whole
// sectors. `passes` walks over the buffer that often, each pass from other blocks. The indices cost a few
// instructions only: a remainder instead of the mask takes more time than the stores.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

struct Store {
  template <typename T>
  __device__ void operator()(T* target, T value) const {
    *target = value;
  }
};

struct AtomicAdd {
  template <typename T>
  __device__ void operator()(T* target, T value) const {
    atomicAdd(target, value);
  }
};

// What atomicAdd could be for a pair in global memory: cuda_fp16.hpp has `atom`, whose result is not used.
struct Reduction {
  __device__ void operator()(__half2* target, __half2 value) const {
    asm volatile("red.global.add.noftz.f16x2 [%0], %1;"
                 :
                 : "l"(target), "r"(*reinterpret_cast<uint32_t*>(&value))
                 : "memory");
  }
};

// `count` is a power of two.
template <typename Operation, typename T>
__global__ void touch_kernel(T* data, uint32_t count, int passes, T value) {
  const uint32_t step = gridDim.x * blockDim.x;
  for (int pass = 0; pass < passes; ++pass) {
    const uint32_t shift = pass * (step / 2 + 32 * 1031);  // another block's elements in each pass
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
      Operation()(data + ((i + shift) & (count - 1)), value);
    }
  }
}

template <typename Operation, typename T>
cudaError_t run(void* data, int64_t bytes, int passes, T value) {
  const int64_t count = bytes / int64_t(sizeof(T));
  if (count > int64_t(1) << 30 || (count & (count - 1)) != 0) return cudaErrorInvalidValue;
  touch_kernel<Operation>
      <<<132 * 8, 256>>>(static_cast<T*>(data), static_cast<uint32_t>(count), passes, value);
  return cudaGetLastError();
}

}  // namespace

// type: 0 float, 1 half2, 2 bfloat162. operation: 0 store, 1 atomicAdd, 2 reduction (half2 only).
// Returns a cudaError_t.
extern "C" int touch(int type, int operation, void* data, int64_t bytes, int passes) {
  const __half2 halves = __floats2half2_rn(1e-3f, 1e-3f);
  const __nv_bfloat162 bfloats = __floats2bfloat162_rn(1e-3f, 1e-3f);
  switch (3 * type + operation) {
    case 0: return run<Store>(data, bytes, passes, 1e-3f);
    case 1: return run<AtomicAdd>(data, bytes, passes, 1e-3f);
    case 3: return run<Store>(data, bytes, passes, halves);
    case 4: return run<AtomicAdd>(data, bytes, passes, halves);
    case 5: return run<Reduction>(data, bytes, passes, halves);
    case 6: return run<Store>(data, bytes, passes, bfloats);
    case 7: return run<AtomicAdd>(data, bytes, passes, bfloats);
    default: return cudaErrorInvalidValue;
  }
}
