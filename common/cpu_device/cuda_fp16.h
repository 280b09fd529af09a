// __half and __half2 of the CPU device.
#pragma once

#include "device_float16.h"

using __half = cpu_device::Float16<cpu_device::Half>;
using __half2 = cpu_device::Float16x2<cpu_device::Half>;
using half = __half;
using half2 = __half2;

inline __half __float2half(float x) {
  return __half(x);
}
inline __half __float2half_rn(float x) {
  return __half(x);
}
inline float __half2float(__half x) {
  return x;
}
inline __half2 __float2half2_rn(float x) {
  return {__half(x), __half(x)};
}
inline __half2 __floats2half2_rn(float x, float y) {
  return {__half(x), __half(y)};
}
inline __half2 __float22half2_rn(float2 v) {
  return {__half(v.x), __half(v.y)};
}
inline float2 __half22float2(__half2 v) {
  return {v.x, v.y};
}
inline __half2 __halves2half2(__half x, __half y) {
  return {x, y};
}
inline __half2 __half2half2(__half x) {
  return {x, x};
}
inline __half2 make_half2(__half x, __half y) {
  return {x, y};
}
inline unsigned short __half_as_ushort(__half x) {
  return x.__x;
}
inline __half __ushort_as_half(unsigned short bits) {
  return __half::from_bits(bits);
}

inline __half atomicAdd(__half* address, __half value) {
  return __half::from_bits(cpu_device::atomic_add_half(&address->__x, value.__x));
}
inline __half2 atomicAdd(__half2* address, __half2 value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  bits = cpu_device::atomic_add_half2(reinterpret_cast<uint32_t*>(address), bits);
  __builtin_memcpy(&value, &bits, sizeof(bits));
  return value;
}
