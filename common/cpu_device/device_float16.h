// The two 16-bit floating point types, rounded as CUDA rounds: to nearest even, once per operation.
//
// An operation computes in fp32 and rounds the result. For + - * / that equals rounding the exact result
// once, because fp32 carries more than twice the digits (24 >= 2*11 + 2). fma does not have that luxury
// and goes through float16_fma().
#pragma once

#include <cstdint>
#include <cstring>

#include "device_types.h"

namespace cpu_device {

// The builtin, because the checker takes std::memcpy for a copy that the kernel makes.
inline float bits_to_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}
inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// IEEE binary16: 5 exponent bits, 10 fraction bits.
struct Half {
  static constexpr uint16_t kNan = 0x7fff;

  static float to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16;
    const uint32_t magnitude = uint32_t(h & 0x7fffu) << 13;
    // The fields sit where fp32 has them, with an exponent too small by 112; multiplying by 2^112 also
    // normalises subnormals. Infinity and NaN keep the top exponent instead.
    const float finite = bits_to_float(magnitude) * bits_to_float((112u + 127u) << 23);
    const uint32_t bits =
        magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : float_to_bits(finite);
    return bits_to_float(sign | bits);
  }

  static uint16_t from_float(float x) {
    const uint32_t bits = float_to_bits(x);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return kNan;
    if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7c00u);  // >= 65536, infinity included
    if (magnitude >= 0x38800000u) {                                 // normal: >= 2^-14
      const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
      return uint16_t(sign | ((rounded - (112u << 23)) >> 13));
    }
    if (magnitude < 0x33000000u) return sign;  // below half of the smallest subnormal
    const int shift = 126 - int(magnitude >> 23);
    const uint32_t fraction = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t kept = fraction >> shift;
    const uint32_t rest = fraction & ((1u << shift) - 1), half = 1u << (shift - 1);
    return uint16_t(sign | (kept + (rest > half || (rest == half && (kept & 1u)))));
  }
};

// bfloat16: fp32 without its low 16 fraction bits.
struct BFloat16 {
  static constexpr uint16_t kNan = 0x7fff;

  static float to_float(uint16_t h) { return bits_to_float(uint32_t(h) << 16); }

  static uint16_t from_float(float x) {
    const uint32_t bits = float_to_bits(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? kNan : uint16_t(rounded);
  }
};

// Rounded to odd: rounding the result to 16 bits then equals rounding the exact value once.
float round_to_odd(double x);
float float16_fma(float a, float b, float c);  // a * b + c

template <typename Format>
struct Float16 {
  uint16_t __x;

  Float16() = default;
#ifdef CPU_DEVICE_CHECKED
  // A load with a line of its own: GCC gives the copy of a trivial class that of the statement before.
  __attribute__((always_inline)) Float16(const Float16& other) : __x(other.__x) {}
  __attribute__((always_inline)) Float16& operator=(const Float16& other) {
    __x = other.__x;
    return *this;
  }
#endif
  Float16(float x) : __x(Format::from_float(x)) {}
  Float16(double x) : __x(Format::from_float(round_to_odd(x))) {}
  Float16(int x) : __x(Format::from_float(round_to_odd(x))) {}
  operator float() const { return Format::to_float(__x); }

  Float16& operator+=(Float16 other) { return *this = Float16(float(*this) + float(other)); }
  Float16& operator-=(Float16 other) { return *this = Float16(float(*this) - float(other)); }
  Float16& operator*=(Float16 other) { return *this = Float16(float(*this) * float(other)); }
  Float16& operator/=(Float16 other) { return *this = Float16(float(*this) / float(other)); }
  Float16 operator-() const { return from_bits(uint16_t(__x ^ 0x8000u)); }

  static Float16 from_bits(uint16_t bits) {
    Float16 result;
    result.__x = bits;
    return result;
  }
};

template <typename F>
Float16<F> operator+(Float16<F> a, Float16<F> b) {
  return a += b;
}
template <typename F>
Float16<F> operator-(Float16<F> a, Float16<F> b) {
  return a -= b;
}
template <typename F>
Float16<F> operator*(Float16<F> a, Float16<F> b) {
  return a *= b;
}
template <typename F>
Float16<F> operator/(Float16<F> a, Float16<F> b) {
  return a /= b;
}

// Two of them in one 32-bit register.
template <typename F>
struct alignas(4) Float16x2 {
  Float16<F> x, y;
#ifdef CPU_DEVICE_CHECKED
  CPU_DEVICE_COPIED_WHOLE(Float16x2)
#else
  Float16x2() = default;
#endif
  Float16x2(Float16<F> x, Float16<F> y) : x(x), y(y) {}
};

}  // namespace cpu_device

using cpu_device::Float16;
using cpu_device::Float16x2;

template <typename F>
Float16<F> __hadd(Float16<F> a, Float16<F> b) {
  return a + b;
}
template <typename F>
Float16<F> __hsub(Float16<F> a, Float16<F> b) {
  return a - b;
}
template <typename F>
Float16<F> __hmul(Float16<F> a, Float16<F> b) {
  return a * b;
}
template <typename F>
Float16<F> __hdiv(Float16<F> a, Float16<F> b) {
  return a / b;
}
template <typename F>
Float16<F> __hfma(Float16<F> a, Float16<F> b, Float16<F> c) {
  return Float16<F>(cpu_device::float16_fma(a, b, c));
}
template <typename F>
Float16<F> __hneg(Float16<F> a) {
  return -a;
}
template <typename F>
Float16<F> __habs(Float16<F> a) {
  return Float16<F>::from_bits(uint16_t(a.__x & 0x7fffu));
}
template <typename F>
bool __hisnan(Float16<F> a) {
  return float(a) != float(a);
}
// A NaN loses against a number, and +0 is larger than -0.
template <typename F>
Float16<F> __hmax(Float16<F> a, Float16<F> b) {
  if (float(a) == float(b)) return Float16<F>::from_bits(a.__x & b.__x);
  return __hisnan(a) ? b : (__hisnan(b) || float(a) > float(b) ? a : b);
}
template <typename F>
Float16<F> __hmin(Float16<F> a, Float16<F> b) {
  if (float(a) == float(b)) return Float16<F>::from_bits(a.__x | b.__x);
  return __hisnan(a) ? b : (__hisnan(b) || float(a) < float(b) ? a : b);
}
template <typename F>
Float16x2<F> __hadd2(Float16x2<F> a, Float16x2<F> b) {
  return {a.x + b.x, a.y + b.y};
}
template <typename F>
Float16x2<F> __hsub2(Float16x2<F> a, Float16x2<F> b) {
  return {a.x - b.x, a.y - b.y};
}
template <typename F>
Float16x2<F> __hmul2(Float16x2<F> a, Float16x2<F> b) {
  return {a.x * b.x, a.y * b.y};
}
template <typename F>
Float16x2<F> __hfma2(Float16x2<F> a, Float16x2<F> b, Float16x2<F> c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
template <typename F>
float __low2float(Float16x2<F> a) {
  return a.x;
}
template <typename F>
float __high2float(Float16x2<F> a) {
  return a.y;
}

namespace cpu_device {

uint16_t atomic_add_half(uint16_t* address, uint16_t value);
uint16_t atomic_add_bfloat16(uint16_t* address, uint16_t value);
uint32_t atomic_add_half2(uint32_t* address, uint32_t value);
uint32_t atomic_add_bfloat162(uint32_t* address, uint32_t value);

}  // namespace cpu_device
