// Device math functions. The fast intrinsics (__expf ...) are approximations on a GPU and exact here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

inline float __expf(float x) {
  return ::expf(x);
}
inline float __exp2f(float x) {
  return ::exp2f(x);
}
inline float __logf(float x) {
  return ::logf(x);
}
inline float __log2f(float x) {
  return ::log2f(x);
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __fdiv_rn(float x, float y) {
  return x / y;
}
inline float __fsqrt_rn(float x) {
  return ::sqrtf(x);
}
inline float __fmaf_rn(float x, float y, float z) {
  return ::fmaf(x, y, z);
}
// A macro, because newer C libraries declare a function of this name.
#define rsqrtf(x) (1.0f / ::sqrtf(x))
inline float __saturatef(float x) {
  return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
}

inline int __float_as_int(float x) {
  int bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __int_as_float(int bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}
inline unsigned __float_as_uint(float x) {
  return unsigned(__float_as_int(x));
}
inline float __uint_as_float(unsigned bits) {
  return __int_as_float(int(bits));
}
// Four bytes of x (0 to 3) and y (4 to 7), each named by a hexadecimal digit of `selector`, the lowest first.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= unsigned(bytes >> (selector >> 4 * i & 7u) * 8 & 0xffu) << 8 * i;
  }
  return result;
}

inline long long __double_as_longlong(double x) {
  long long bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline double __longlong_as_double(long long bits) {
  double x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x) {
  return __builtin_popcountll(x);
}
inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(unsigned(x));
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= ((x >> bit) & 1u) << (31 - bit);
  return reversed;
}

// CUDA has these in the global namespace. Of a signed and an unsigned integer the unsigned type wins.
#define CPU_DEVICE_MIN_MAX(type, a_type, b_type) \
  inline type min(a_type a, b_type b) {          \
    const type x = a, y = b;                     \
    return x < y ? x : y;                        \
  }                                              \
  inline type max(a_type a, b_type b) {          \
    const type x = a, y = b;                     \
    return x > y ? x : y;                        \
  }
#define CPU_DEVICE_MIN_MAX_INTEGERS(signed_type, unsigned_type)   \
  CPU_DEVICE_MIN_MAX(signed_type, signed_type, signed_type)       \
  CPU_DEVICE_MIN_MAX(unsigned_type, unsigned_type, unsigned_type) \
  CPU_DEVICE_MIN_MAX(unsigned_type, signed_type, unsigned_type)   \
  CPU_DEVICE_MIN_MAX(unsigned_type, unsigned_type, signed_type)
CPU_DEVICE_MIN_MAX_INTEGERS(int, unsigned)
CPU_DEVICE_MIN_MAX_INTEGERS(long, unsigned long)
CPU_DEVICE_MIN_MAX_INTEGERS(long long, unsigned long long)
#undef CPU_DEVICE_MIN_MAX_INTEGERS
#undef CPU_DEVICE_MIN_MAX
inline float min(float a, float b) {
  return ::fminf(a, b);
}
inline float max(float a, float b) {
  return ::fmaxf(a, b);
}
inline double min(double a, double b) {
  return ::fmin(a, b);
}
inline double max(double a, double b) {
  return ::fmax(a, b);
}

// Loads and stores with a hint for the caches, which the CPU device ignores.
#define CPU_DEVICE_LOAD(name) \
  template <typename T>       \
  T name(const T* pointer) {  \
    return *pointer;          \
  }
#define CPU_DEVICE_STORE(name)                                         \
  template <typename T>                                                \
  void name(T* pointer, const typename std::common_type<T>::type& x) { \
    *pointer = x;                                                      \
  }
CPU_DEVICE_LOAD(__ldg)
CPU_DEVICE_LOAD(__ldca)
CPU_DEVICE_LOAD(__ldcg)
CPU_DEVICE_LOAD(__ldcs)
CPU_DEVICE_LOAD(__ldlu)
CPU_DEVICE_LOAD(__ldcv)
CPU_DEVICE_STORE(__stwb)
CPU_DEVICE_STORE(__stcg)
CPU_DEVICE_STORE(__stcs)
CPU_DEVICE_STORE(__stwt)
#undef CPU_DEVICE_LOAD
#undef CPU_DEVICE_STORE
