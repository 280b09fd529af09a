// A kernel that throws. Device code cannot, so only host compilers build this.
#include <stdexcept>

#include "program.h"

__global__ void throw_runtime_error(int* out) {
  out[0] = 1;
  if (blockIdx.x == 2 && threadIdx.x == 5) throw std::runtime_error("no tile 7");
}

__global__ void throw_int(int* out) {
  out[0] = 1;
  if (blockIdx.x == 2 && threadIdx.x == 5) throw 7;
}

// An exception that stays within its thread is no error; other threads run while it is in flight.
__global__ void throw_and_catch(int* out) {
  int value = 0;
  try {
    if (threadIdx.x % 2 == 0) throw static_cast<int>(threadIdx.x);
  } catch (int thrown) {
    __syncwarp(0x55555555u);
    value = thrown + 100;
  }
  out[threadIdx.x] = value;
}

void run_case(const std::string& name, void (*kernel)(int*), dim3 grid) {
  DeviceArray<int> out(std::vector<int>(32, 0));
  const cudaError_t error = launch(kernel, grid, dim3(32), 0, nullptr, out.data());
  std::printf("%s: %s %s\n", name.c_str(), cudaGetErrorName(error), launch_error.c_str());
}

int main() {
  use_schedule_of_environment();
  run_case("throw_runtime_error", throw_runtime_error, dim3(4));
  run_case("throw_int", throw_int, dim3(4));
  DeviceArray<int> out(32);
  run(throw_and_catch, dim3(1), dim3(32), 0, out.data());
  print("throw_and_catch", out);
}
