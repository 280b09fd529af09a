// Needs compute capability 8.0.
//
// Asynchronous copies: groups that arrive in order, zeros instead of what is outside, a pipeline of stages.
#include "common/cuda/async_copy.h"

#include "program.h"

constexpr int kThreads = 64;

__device__ float4* shared_of_thread(int copy) {
  return dynamic_smem<float4>() + copy * kThreads + threadIdx.x;
}

// Each thread copies 4 times 16 bytes: groups of one, none, two and, not ended, one. in [4, kThreads, 4];
// out [5, 4, kThreads, 4]: after waits for all but 3, 2, 1, 0 groups, and once more after the last group. What
// has not arrived is poison on the CPU device, and anything on a GPU.
__global__ void groups(const float4* in, float4* out) {
  const auto start = [&](int copy) {
    cp_async_16(shared_of_thread(copy), in + copy * kThreads + threadIdx.x);
  };
  const auto save = [&](int row) {
    for (int copy = 0; copy < 4; ++copy) {
      out[(row * 4 + copy) * kThreads + threadIdx.x] = *shared_of_thread(copy);
    }
  };
  for (int copy = 0; copy < 4; ++copy) {
    *shared_of_thread(copy) = make_float4(1.0f, 2.0f, 3.0f, 4.0f);  // must not stay
  }
  start(0);
  cp_async_commit();
  cp_async_commit();
  start(1);
  start(2);
  cp_async_commit();
  start(3);
  cp_async_wait<3>();
  save(0);
  cp_async_wait<2>();
  save(1);
  cp_async_wait<1>();
  save(2);
  cp_async_wait<0>();
  save(3);
  cp_async_commit();
  cp_async_wait<0>();
  save(4);
}

// Copies that are outside bring zeros, whatever their address; the first element of `in` is never copied.
// out [kThreads, 4]
__global__ void outside(const float4* in, float4* out, int num_inside) {
  const bool inside = static_cast<int>(threadIdx.x) < num_inside;
  cp_async_16(shared_of_thread(0), inside ? in + 1 + threadIdx.x : nullptr, inside);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  out[threadIdx.x] = dynamic_smem<float4>()[kThreads - 1 - threadIdx.x];
}

// The sum of the tiles of `in` [num_tiles, kThreads, 4], kStages of them in shared memory. Threads read what
// others have copied. out [kThreads, 4]
template <int kStages>
__global__ void pipeline(const float4* in, float4* out, int num_tiles) {
  const auto start = [&](int tile) {
    if (tile < num_tiles) {
      cp_async_16(shared_of_thread(tile % kStages), in + tile * kThreads + threadIdx.x);
    }
    cp_async_commit();  // also where no tile is left, so that the waits count the same
  };
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int tile = 0; tile < kStages - 1; ++tile) start(tile);
  for (int tile = 0; tile < num_tiles; ++tile) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // everybody's copies have arrived, and the oldest tile is not read any more
    start(tile + kStages - 1);
    const float4 x = dynamic_smem<float4>()[tile % kStages * kThreads + kThreads - 1 - threadIdx.x];
    sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
  }
  out[threadIdx.x] = sum;
}

// The source changes once the copy has arrived, and once more after the next one. out [2, kThreads]
__global__ void change_source(float* source, float* out) {
  for (int repeat = 0; repeat < 2; ++repeat) {
    source[4 * threadIdx.x] = static_cast<float>(100 * repeat + threadIdx.x);
    cp_async_16(shared_of_thread(0), source + 4 * threadIdx.x);
    cp_async_commit();
    cp_async_wait<0>();
    source[4 * threadIdx.x] = -1.0f;
    out[repeat * kThreads + threadIdx.x] = shared_of_thread(0)->x;
  }
}

int main() {
  use_schedule_of_environment();
  const int tile = 4 * kThreads;
  DeviceArray<float> in(random_eighths(10 * tile));
  float4* in4 = reinterpret_cast<float4*>(in.data());
  const auto run_and_print = [&](const std::string& name, size_t size, auto launch_with) {
    DeviceArray<float> out(size);
    launch_with(reinterpret_cast<float4*>(out.data()));
    print(name, out);
  };
  const size_t bytes = tile * sizeof(float);
  run_and_print("groups", 20 * tile,
                [&](float4* out) { run(groups, 1, kThreads, 4 * bytes, in4, out); });
  run_and_print("outside", tile,
                [&](float4* out) { run(outside, 1, kThreads, bytes, in4, out, 40); });
  run_and_print("pipeline.2", tile,
                [&](float4* out) { run(pipeline<2>, 1, kThreads, 2 * bytes, in4, out, 10); });
  run_and_print("pipeline.4", tile,
                [&](float4* out) { run(pipeline<4>, 1, kThreads, 4 * bytes, in4, out, 9); });
  DeviceArray<float> source(random_eighths(tile)), out(2 * kThreads);
  run(change_source, 1, kThreads, bytes, source.data(), out.data());
  print("change_source", out);
}
