// dim3, the built-in variables and the vector types.
#pragma once

#include <cstdint>

#define CPU_DEVICE_VECTOR(scalar, name, align2, align4)                   \
  struct name##1 {                                                        \
    scalar x;                                                             \
  };                                                                      \
  struct alignas(align2) name##2 {                                        \
    scalar x, y;                                                          \
  };                                                                      \
  struct name##3 {                                                        \
    scalar x, y, z;                                                       \
  };                                                                      \
  struct alignas(align4) name##4 {                                        \
    scalar x, y, z, w;                                                    \
  };                                                                      \
  inline name##1 make_##name##1(scalar x) {                               \
    return {x};                                                           \
  }                                                                       \
  inline name##2 make_##name##2(scalar x, scalar y) {                     \
    return {x, y};                                                        \
  }                                                                       \
  inline name##3 make_##name##3(scalar x, scalar y, scalar z) {           \
    return {x, y, z};                                                     \
  }                                                                       \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { \
    return {x, y, z, w};                                                  \
  }

CPU_DEVICE_VECTOR(signed char, char, 2, 4)
CPU_DEVICE_VECTOR(unsigned char, uchar, 2, 4)
CPU_DEVICE_VECTOR(short, short, 4, 8)
CPU_DEVICE_VECTOR(unsigned short, ushort, 4, 8)
CPU_DEVICE_VECTOR(int, int, 8, 16)
CPU_DEVICE_VECTOR(unsigned int, uint, 8, 16)
CPU_DEVICE_VECTOR(long long, longlong, 16, 16)
CPU_DEVICE_VECTOR(unsigned long long, ulonglong, 16, 16)
CPU_DEVICE_VECTOR(float, float, 8, 16)
CPU_DEVICE_VECTOR(double, double, 16, 16)
#undef CPU_DEVICE_VECTOR

struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

// __thread rather than thread_local: these need no constructor, so an access needs no wrapper call.
extern __thread uint3 threadIdx;
extern __thread uint3 blockIdx;
extern __thread uint3 blockDim;
extern __thread uint3 gridDim;
inline constexpr int warpSize = 32;

namespace cpu_device {

// Where a barrier, shuffle or atomic stands in the kernel's source; filled in by default arguments.
struct Site {
  const char* file;
  int line;
};

[[noreturn]] void fail_trap(const char* file, int line);

}  // namespace cpu_device

#define __trap() ::cpu_device::fail_trap(__FILE__, __LINE__)
