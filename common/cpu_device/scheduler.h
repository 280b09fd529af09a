// How the CPU device runs a grid: blocks on OS threads, CUDA threads as fibers of their block.
#pragma once

#include <setjmp.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_runtime.h"

namespace cpu_device {

// Limits of the modelled device, those of compute capability 9.0.
inline constexpr unsigned kMaxThreadsPerBlock = 1024;
inline constexpr unsigned kMaxBlockX = 1024, kMaxBlockY = 1024, kMaxBlockZ = 64;
inline constexpr uint64_t kMaxGridX = 2147483647, kMaxGridY = 65535, kMaxGridZ = 65535;
inline constexpr size_t kDefaultSharedBytes = 48 * 1024;
inline constexpr size_t kMaxSharedBytes = 227 * 1024;

// An error found while a kernel runs.
struct Finding {
  cudaError_t code = cudaSuccess;
  std::string text;
};

// A memory range of one OS thread that static __shared__ arrays occupy.
struct SharedArray {
  size_t offset;  // in the library's thread-local block
  size_t bytes;
  std::string name;  // mangled
  uintptr_t
      owner;  // the function of the library that declares it, or 0: inlined wherever it is called
};

// What is read once from the library that a kernel lives in.
struct Library {
  std::string path;
  uintptr_t base = 0;                      // where it is loaded
  uintptr_t code_start = 0, code_end = 0;  // of its instructions
  size_t tls_module = 0;
  std::vector<SharedArray> shared_arrays;
  // Offsets of the bytes that tell whether a thread-local variable was initialised: GCC has one for each
  // array of a class, also where nothing is to be done.
  std::vector<size_t> guards;
  bool calls_named_barriers = false;
  struct Function {
    uintptr_t address;
    size_t bytes;
    std::string name;
    bool is_local;  // no other library can call it
  };
  std::vector<Function> functions;

  bool has_instruction(const void* address) const;
  // "(anonymous namespace)::kernel(int)" becomes "kernel"; "?" when there is no symbol.
  std::string function_name(const void* address) const;
  // Bytes of the __shared__ arrays that the function itself declares.
  size_t static_shared_bytes(const void* function) const;

 private:
  const Function* find(const void* address) const;
};

const Library& library_of(const void* address);

// Ends the block for an access of the running thread to an address that is not a multiple of `bytes`, or, if
// `is_shared`, not one of shared memory. With the checker at work only the latter: it reports the former.
void require_address(const char* function, const void* address, size_t bytes, bool is_shared,
                     Site site);

// For what threads of a block share and wait for: ends the block with an error, the running thread waits until
// another one calls wake() with the same address, and `describe` tells what it waits for.
[[noreturn]] void end_block(const std::string& text, const char* tool, Site site);
void sleep_on(const void* address, std::string (*describe)(const void* address), Site site);
void wake(const void* address);
std::string name_of(Site site);

// Address of the calling OS thread's copy of a library's thread-local block.
char* thread_local_block(const Library& library);

}  // namespace cpu_device

extern "C" {

// kParallel spreads blocks over the cores. kInOrder and seeds >= 0 run on the calling thread, so a run is
// reproducible bit for bit; a seed shuffles the blocks and the threads of each block.
inline constexpr int64_t kParallel = -2, kInOrder = -1;
void cpu_device_set_schedule(int64_t schedule);

// The launches of the calling thread since the log was cleared, a line each: kernel, grid, block, bytes of
// dynamic shared memory.
const char* cpu_device_launch_log();
void cpu_device_clear_launch_log();

// A block that does not end within this time is reported as an endless loop. 0 switches the limit off.
void cpu_device_set_block_timeout(double seconds);
}
