// How fast a GPU adds to memory, against plain stores: a program for common/experiments.py, not a chapter.
//
// Every thread of a warp takes the next element, as the chapters' dQ products do, so that a warp touches whole
// sectors. `passes` walks over the buffer that often, each pass from other blocks.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

template <typename T, bool kAdd>
__global__ void touch_kernel(T* data, int64_t count, int passes, T value) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int pass = 0; pass < passes; ++pass) {
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
      // Another block's elements in each pass.
      const int64_t j = (i + pass * (step / 2 + 32 * 1031)) % count;
      if constexpr (kAdd) {
        atomicAdd(data + j, value);
      } else {
        data[j] = value;
      }
    }
  }
}

template <typename T>
cudaError_t run(bool add, void* data, int64_t bytes, int passes, T value) {
  const int64_t count = bytes / int64_t(sizeof(T));
  T* elements = static_cast<T*>(data);
  if (add) {
    touch_kernel<T, true><<<132 * 8, 256>>>(elements, count, passes, value);
  } else {
    touch_kernel<T, false><<<132 * 8, 256>>>(elements, count, passes, value);
  }
  return cudaGetLastError();
}

}  // namespace

// type: 0 float, 1 half2, 2 bfloat162. Returns a cudaError_t.
extern "C" int touch(int type, int add, void* data, int64_t bytes, int passes) {
  switch (type) {
    case 0: return run<float>(add != 0, data, bytes, passes, 1e-3f);
    case 1: return run<__half2>(add != 0, data, bytes, passes, __floats2half2_rn(1e-3f, 1e-3f));
    default:
      return run<__nv_bfloat162>(add != 0, data, bytes, passes,
                                 __floats2bfloat162_rn(1e-3f, 1e-3f));
  }
}
