// Device functions that the compiler must not inline: atomics, and the 16-bit arithmetic that rounding an
// fp32 result would get wrong.
#include "device_atomics.h"

#include <cmath>
#include <cstring>

#include "checker.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "device_reduce.h"
#include "scheduler.h"

// The first line of every atomic.
#define ANNOUNCE(address)                                                                       \
  if constexpr (cpu_device::kChecked) {                                                         \
    cpu_device::checker::access_atomic(address, sizeof(*address), __builtin_return_address(0)); \
  }

namespace cpu_device {
namespace {

template <typename T>
T fetch_add(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

// Replaces the bits at `address` by f(bits) atomically and returns the old bits.
template <typename Bits, typename Function>
Bits fetch_update(Bits* address, Function f) {
  Bits old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &old, f(old), true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return old;
}

template <typename T, typename Bits>
T fetch_add_float(T* address, T value) {
  const Bits old = fetch_update(reinterpret_cast<Bits*>(address), [value](Bits bits) {
    T current;
    std::memcpy(&current, &bits, sizeof(T));
    current += value;
    std::memcpy(&bits, &current, sizeof(T));
    return bits;
  });
  T result;
  std::memcpy(&result, &old, sizeof(T));
  return result;
}

template <typename T>
T compare_and_swap(T* address, T expected, T desired) {
  __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_RELAXED,
                              __ATOMIC_RELAXED);
  return expected;
}

template <typename F>
uint16_t add16(uint16_t a, uint16_t b) {
  return F::from_float(F::to_float(a) + F::to_float(b));
}
template <typename F>
uint32_t add16x2(uint32_t a, uint32_t b) {
  return uint32_t(add16<F>(uint16_t(a), uint16_t(b))) |
         uint32_t(add16<F>(uint16_t(a >> 16), uint16_t(b >> 16))) << 16;
}

}  // namespace

uint16_t atomic_add_half(uint16_t* address, uint16_t value) {
  ANNOUNCE(address)
  return fetch_update(address, [value](uint16_t old) { return add16<Half>(old, value); });
}
uint16_t atomic_add_bfloat16(uint16_t* address, uint16_t value) {
  ANNOUNCE(address)
  return fetch_update(address, [value](uint16_t old) { return add16<BFloat16>(old, value); });
}
uint32_t atomic_add_half2(uint32_t* address, uint32_t value) {
  ANNOUNCE(address)
  return fetch_update(address, [value](uint32_t old) { return add16x2<Half>(old, value); });
}
uint32_t atomic_add_bfloat162(uint32_t* address, uint32_t value) {
  ANNOUNCE(address)
  return fetch_update(address, [value](uint32_t old) { return add16x2<BFloat16>(old, value); });
}

void reduce_add(float* address, const float* x, Site site) {
  require_address("reduce_add", address, 16, false, site);
  if constexpr (kChecked) checker::access_atomic(address, 16, __builtin_return_address(0));
  for (int i = 0; i < 4; ++i) fetch_add_float<float, uint32_t>(address + i, x[i]);
}

float round_to_odd(double x) {
  float result = float(x);
  if (double(result) == x || !std::isfinite(result)) return result;
  // Truncate, and let the last bit say that something was cut off.
  uint32_t bits = float_to_bits(result);
  if (std::fabs(double(result)) > std::fabs(x)) --bits;
  return bits_to_float(bits | 1u);
}

float float16_fma(float a, float b, float c) {
  const double product = double(a) * double(b);  // exact: at most 22 digits
  double sum = product + c;
  if (!std::isfinite(sum)) return float(sum);
  const double virtual_c = sum - product;
  const double error = (product - (sum - virtual_c)) + (c - virtual_c);
  uint64_t bits;
  std::memcpy(&bits, &sum, sizeof(bits));
  if (error != 0.0 && (bits & 1u) == 0) bits += (error > 0.0) == (sum > 0.0) ? 1 : -1;
  std::memcpy(&sum, &bits, sizeof(bits));
  return round_to_odd(sum);
}

}  // namespace cpu_device

using namespace cpu_device;

int atomicAdd(int* p, int v) {
  ANNOUNCE(p)
  return fetch_add(p, v);
}
unsigned atomicAdd(unsigned* p, unsigned v) {
  ANNOUNCE(p)
  return fetch_add(p, v);
}
unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) {
  ANNOUNCE(p)
  return fetch_add(p, v);
}
float atomicAdd(float* p, float v) {
  ANNOUNCE(p)
  return fetch_add_float<float, uint32_t>(p, v);
}
double atomicAdd(double* p, double v) {
  ANNOUNCE(p)
  return fetch_add_float<double, uint64_t>(p, v);
}

int atomicSub(int* p, int v) {
  ANNOUNCE(p)
  return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED);
}
unsigned atomicSub(unsigned* p, unsigned v) {
  ANNOUNCE(p)
  return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED);
}

int atomicExch(int* p, int v) {
  ANNOUNCE(p)
  return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);
}
unsigned atomicExch(unsigned* p, unsigned v) {
  ANNOUNCE(p)
  return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);
}
unsigned long long atomicExch(unsigned long long* p, unsigned long long v) {
  ANNOUNCE(p)
  return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);
}
float atomicExch(float* p, float v) {
  ANNOUNCE(p)
  return bits_to_float(
      __atomic_exchange_n(reinterpret_cast<uint32_t*>(p), float_to_bits(v), __ATOMIC_RELAXED));
}

int atomicMin(int* p, int v) {
  ANNOUNCE(p)
  return fetch_update(p, [v](int old) { return old < v ? old : v; });
}
unsigned atomicMin(unsigned* p, unsigned v) {
  ANNOUNCE(p)
  return fetch_update(p, [v](unsigned old) { return old < v ? old : v; });
}
int atomicMax(int* p, int v) {
  ANNOUNCE(p)
  return fetch_update(p, [v](int old) { return old > v ? old : v; });
}
unsigned atomicMax(unsigned* p, unsigned v) {
  ANNOUNCE(p)
  return fetch_update(p, [v](unsigned old) { return old > v ? old : v; });
}

unsigned atomicInc(unsigned* p, unsigned limit) {
  ANNOUNCE(p)
  return fetch_update(p, [limit](unsigned old) { return old >= limit ? 0u : old + 1u; });
}
unsigned atomicDec(unsigned* p, unsigned limit) {
  ANNOUNCE(p)
  return fetch_update(
      p, [limit](unsigned old) { return old == 0u || old > limit ? limit : old - 1u; });
}

int atomicCAS(int* p, int e, int d) {
  ANNOUNCE(p)
  return compare_and_swap(p, e, d);
}
unsigned atomicCAS(unsigned* p, unsigned e, unsigned d) {
  ANNOUNCE(p)
  return compare_and_swap(p, e, d);
}
unsigned long long atomicCAS(unsigned long long* p, unsigned long long e, unsigned long long d) {
  ANNOUNCE(p)
  return compare_and_swap(p, e, d);
}
unsigned short atomicCAS(unsigned short* p, unsigned short e, unsigned short d) {
  ANNOUNCE(p)
  return compare_and_swap(p, e, d);
}

int atomicAnd(int* p, int v) {
  ANNOUNCE(p)
  return __atomic_fetch_and(p, v, __ATOMIC_RELAXED);
}
unsigned atomicAnd(unsigned* p, unsigned v) {
  ANNOUNCE(p)
  return __atomic_fetch_and(p, v, __ATOMIC_RELAXED);
}
int atomicOr(int* p, int v) {
  ANNOUNCE(p)
  return __atomic_fetch_or(p, v, __ATOMIC_RELAXED);
}
unsigned atomicOr(unsigned* p, unsigned v) {
  ANNOUNCE(p)
  return __atomic_fetch_or(p, v, __ATOMIC_RELAXED);
}
int atomicXor(int* p, int v) {
  ANNOUNCE(p)
  return __atomic_fetch_xor(p, v, __ATOMIC_RELAXED);
}
unsigned atomicXor(unsigned* p, unsigned v) {
  ANNOUNCE(p)
  return __atomic_fetch_xor(p, v, __ATOMIC_RELAXED);
}
