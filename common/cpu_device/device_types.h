// dim3, the built-in variables and the vector types.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef CPU_DEVICE_CHECKED
// Loads and stores a vector as one access, as CUDA does: a compiler would split it into its elements.
namespace cpu_device {
void copy_vector(void* target, const void* source, std::size_t bytes);
}
#define CPU_DEVICE_COPIED_WHOLE(type)                                 \
  type() = default;                                                   \
  __attribute__((always_inline)) type(const type& other) {            \
    cpu_device::copy_vector(this, &other, sizeof(type));              \
  }                                                                   \
  __attribute__((always_inline)) type& operator=(const type& other) { \
    cpu_device::copy_vector(this, &other, sizeof(type));              \
    return *this;                                                     \
  }
#define CPU_DEVICE_VECTOR_2(scalar, type) \
  CPU_DEVICE_COPIED_WHOLE(type)           \
  type(scalar x, scalar y) : x(x), y(y) {}
#define CPU_DEVICE_VECTOR_4(scalar, type) \
  CPU_DEVICE_COPIED_WHOLE(type)           \
  type(scalar x, scalar y, scalar z, scalar w) : x(x), y(y), z(z), w(w) {}
#else
#define CPU_DEVICE_COPIED_WHOLE(type)
#define CPU_DEVICE_VECTOR_2(scalar, type)
#define CPU_DEVICE_VECTOR_4(scalar, type)
#endif

#define CPU_DEVICE_VECTOR(scalar, name, align2, align4)                   \
  struct name##1 {                                                        \
    scalar x;                                                             \
  };                                                                      \
  struct alignas(align2) name##2 {                                        \
    scalar x, y;                                                          \
    CPU_DEVICE_VECTOR_2(scalar, name##2)                                  \
  };                                                                      \
  struct name##3 {                                                        \
    scalar x, y, z;                                                       \
  };                                                                      \
  struct alignas(align4) name##4 {                                        \
    scalar x, y, z, w;                                                    \
    CPU_DEVICE_VECTOR_4(scalar, name##4)                                  \
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
#undef CPU_DEVICE_VECTOR_2
#undef CPU_DEVICE_VECTOR_4

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
