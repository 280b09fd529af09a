// __nv_bfloat16 and __nv_bfloat162 of the CPU device.
#pragma once

#include "device_float16.h"

using __nv_bfloat16 = cpu_device::Float16<cpu_device::BFloat16>;
using __nv_bfloat162 = cpu_device::Float16x2<cpu_device::BFloat16>;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline __nv_bfloat16 __float2bfloat16(float x) {
  return __nv_bfloat16(x);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  return __nv_bfloat16(x);
}
inline float __bfloat162float(__nv_bfloat16 x) {
  return x;
}
inline __nv_bfloat162 __float2bfloat162_rn(float x) {
  return {__nv_bfloat16(x), __nv_bfloat16(x)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) {
  return {__nv_bfloat16(v.x), __nv_bfloat16(v.y)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 v) {
  return {v.x, v.y};
}
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) {
  return {x, y};
}
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) {
  return {x, x};
}
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) {
  return {x, y};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) {
  return x.__x;
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  return __nv_bfloat16::from_bits(bits);
}

inline __nv_bfloat16 atomicAdd(__nv_bfloat16* address, __nv_bfloat16 value) {
  return __nv_bfloat16::from_bits(cpu_device::atomic_add_bfloat16(&address->__x, value.__x));
}
inline __nv_bfloat162 atomicAdd(__nv_bfloat162* address, __nv_bfloat162 value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  bits = cpu_device::atomic_add_bfloat162(reinterpret_cast<uint32_t*>(address), bits);
  __builtin_memcpy(&value, &bits, sizeof(bits));
  return value;
}
