// Barriers, shuffles and votes.
//
// A warp operation is a rendezvous: it completes once every lane named in `mask` that has not returned
// has called the same operation with the same mask. A lane that is named but has returned, or whose
// value nobody supplies, reads as poison (all bits one), since CUDA leaves it undefined.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "device_types.h"

#define CPU_DEVICE_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace cpu_device {

enum class WarpOp {
  sync,
  shfl,
  shfl_up,
  shfl_down,
  shfl_xor,
  ballot,
  all,
  any,
  match_any,
  collective,
};
enum class BarrierOp { sync, count, all, any };

int block_barrier(BarrierOp op, int predicate, Site site);
// `source` is the lane whose value the caller receives (shuffles only).
uint64_t warp_exchange(WarpOp op, unsigned mask, uint64_t value, int source, Site site);
unsigned active_mask(Site site);
int lane_id();

inline constexpr int kWarpgroupLanes = 128;

// An operation of all 32 lanes of a warp, or 128 of four warps, from one line. The last lane to arrive runs it,
// given what each lane passed. A lane that has returned is an error here.
struct Collective {
  const char* name;
  void (*run)(void* const* operands);  // by lane
  int num_lanes = 32;
};
void warp_collective(const Collective& collective, void* operands, Site site);

template <typename T>
T shuffle(WarpOp op, unsigned mask, T value, int source, Site site) {
  // Not trivially copyable: in a checked build, vectors announce their copies.
  static_assert(std::is_trivially_destructible_v<T> && sizeof(T) <= 8,
                "a shuffle moves up to 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = warp_exchange(op, mask, bits, source, site);
  __builtin_memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}

// First lane of the caller's segment of `width` lanes.
inline int segment_start(int width) {
  return lane_id() & ~(width - 1);
}

}  // namespace cpu_device

inline void __syncthreads(CPU_DEVICE_SITE) {
  cpu_device::block_barrier(cpu_device::BarrierOp::sync, 0, {file, line});
}
inline int __syncthreads_count(int predicate, CPU_DEVICE_SITE) {
  return cpu_device::block_barrier(cpu_device::BarrierOp::count, predicate, {file, line});
}
inline int __syncthreads_and(int predicate, CPU_DEVICE_SITE) {
  return cpu_device::block_barrier(cpu_device::BarrierOp::all, predicate, {file, line});
}
inline int __syncthreads_or(int predicate, CPU_DEVICE_SITE) {
  return cpu_device::block_barrier(cpu_device::BarrierOp::any, predicate, {file, line});
}
inline void __syncwarp(unsigned mask = 0xffffffffu, CPU_DEVICE_SITE) {
  cpu_device::warp_exchange(cpu_device::WarpOp::sync, mask, 0, 0, {file, line});
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CPU_DEVICE_SITE) {
  const int lane = cpu_device::segment_start(width) + (source & (width - 1));
  return cpu_device::shuffle(cpu_device::WarpOp::shfl, mask, value, lane, {file, line});
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CPU_DEVICE_SITE) {
  const int self = cpu_device::lane_id(), lane = self - int(delta);
  const int source = lane < cpu_device::segment_start(width) ? self : lane;
  return cpu_device::shuffle(cpu_device::WarpOp::shfl_up, mask, value, source, {file, line});
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CPU_DEVICE_SITE) {
  const int self = cpu_device::lane_id(), lane = self + int(delta);
  const int source = lane >= cpu_device::segment_start(width) + width ? self : lane;
  return cpu_device::shuffle(cpu_device::WarpOp::shfl_down, mask, value, source, {file, line});
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CPU_DEVICE_SITE) {
  const int self = cpu_device::lane_id(), lane = self ^ lane_mask;
  // As on hardware: reaching into a later segment returns the caller's own value.
  const int source = lane >= cpu_device::segment_start(width) + width ? self : lane;
  return cpu_device::shuffle(cpu_device::WarpOp::shfl_xor, mask, value, source, {file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, CPU_DEVICE_SITE) {
  return unsigned(
      cpu_device::warp_exchange(cpu_device::WarpOp::ballot, mask, predicate != 0, 0, {file, line}));
}
inline int __all_sync(unsigned mask, int predicate, CPU_DEVICE_SITE) {
  return int(
      cpu_device::warp_exchange(cpu_device::WarpOp::all, mask, predicate != 0, 0, {file, line}));
}
inline int __any_sync(unsigned mask, int predicate, CPU_DEVICE_SITE) {
  return int(
      cpu_device::warp_exchange(cpu_device::WarpOp::any, mask, predicate != 0, 0, {file, line}));
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value, CPU_DEVICE_SITE) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return unsigned(
      cpu_device::warp_exchange(cpu_device::WarpOp::match_any, mask, bits, 0, {file, line}));
}
// The lanes that reach the same call: the CPU device lets every lane of the block run as far as it can
// and then groups those that wait here by source line.
inline unsigned __activemask(CPU_DEVICE_SITE) {
  return cpu_device::active_mask({file, line});
}

inline void __threadfence_block() {}
inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
