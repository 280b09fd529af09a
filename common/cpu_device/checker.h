// What the scheduler tells the checker. The fast build compiles none of these calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "device_types.h"
#include "scheduler.h"

namespace cpu_device {

#ifdef CPU_DEVICE_CHECKED
inline constexpr bool kChecked = true;
#else
inline constexpr bool kChecked = false;
#endif

namespace checker {

// Whether a check is under way: between cpu_device_check_begin() and cpu_device_check_end().
bool active();

void start_launch(const Library& library, const void* kernel, const std::string& name,
                  const cudaLaunchConfig_t& config, const void* closure, size_t closure_bytes);
void end_launch();
void start_block(uint64_t block);
void end_block();

// The fiber of `thread` runs next, on the stack that begins at `stack`.
void enter_thread(int thread, const char* stack, size_t stack_bytes);
// Every thread of the block has arrived at a block barrier.
void pass_barrier(Site site);
// The lanes `lanes` of the warp that starts at thread `first` have met; a __syncwarp orders memory, the
// other warp operations only let the lanes go on together. `returned`: lanes that the mask names, but that
// have returned.
void pass_warp_op(int first, unsigned lanes, unsigned returned, bool orders_memory, Site site);
// All lanes of a warp have arrived at a named barrier.
void arrive_at_barrier(int id, int warp);
// Enough warps have: `warps`, of which those in `waiting` go on only now. `site`: a line that calls it.
void pass_named_barrier(int id, uint32_t warps, uint32_t waiting, Site site);
// `thread` received the value of a lane that its shuffle's mask does not name, or that has returned.
void read_absent_lane(int source, uint3 thread, Site site);

// The block is past its time limit: its next access ends it, or the one under way when it is recorded.
void end_after_access();

// The lanes `full` of the warp that starts at thread `first` wait for space in their logs, the others cannot
// go on before them. Returns the lanes that have space again, at least one.
unsigned make_log_space(int first, unsigned full);

// A barrier, shuffle or crash that ended the block; `kind` is one of compute-sanitizer's tools or "error".
// `instruction`: where it happened, if no site is known.
void report(const char* kind, const std::string& text, Site site, const void* instruction);

// Accesses that the compiler does not announce: an atomic, a row of a matrix.
void access_atomic(const void* address, size_t bytes, const void* return_address);
void access_row(const void* address, bool is_write, const void* return_address);
// An asynchronous copy of 16 bytes begins; `global` is null where zeros are written. And it arrives.
void start_copy(const void* shared, const void* global, const void* return_address);
void land_copy(const void* shared);
// What the copies of tensor_map.h read, at any multiple of 16 bytes, and their destinations. `barrier` counts the
// mbarriers of the block. A copy lands when a phase of its barrier is complete.
void read_by_copy(const void* global, size_t bytes, const void* return_address);
void start_bulk_copy(const void* shared, size_t bytes, const void* return_address);
void land_bulk_copy(const void* shared, size_t bytes, int barrier);
void arrive_at_mbarrier(int barrier);
void complete_mbarrier(int barrier);
void pass_mbarrier(int barrier);
// 16 bytes of shared memory that a wgmma reads for the running thread, until a wait for its group.
void read_by_product(const void* shared, const void* return_address);
void commit_products();
void wait_for_products(int num_pending);
void fence_async_proxy();
// Returns whether the memset is one that may be done.
bool memset_device(const void* address, size_t bytes);

// A backward jump of a library's machine code, `last`, and where it goes, as offsets in the library.
struct Loop {
  uint32_t first, last;
};
// In order of `last`. Empty if there is no objdump.
const std::vector<Loop>& loops_of(const Library& library);

}  // namespace checker

// By the scheduler, for the checker: ends the block of the running thread for a finding that is already
// reported, or for its time limit; and lets the other threads of its warp catch up until there is space in its
// log.
[[noreturn]] void abandon_checked_block();
[[noreturn]] void abandon_late_block();
void wait_for_log_space();

}  // namespace cpu_device

// The interface that Python uses. One check at a time.
extern "C" {

// Starts a check. Device memory is [arena, arena + bytes); what no region covers is out of bounds.
void cpu_device_check_begin(void* arena, size_t bytes);
// A tensor or a part of the workspace; starts at a multiple of 256 bytes from the arena's start, plus `skew`.
// `valid` has one byte per element of `item_bytes`, 0 where the element is not the tensor's, or is null.
// Flags: 1 = the kernel may not write it, 2 = it has been written before.
void cpu_device_check_region(const char* name, void* address, size_t bytes, int item_bytes,
                             const unsigned char* valid, int flags);
// Ends the check and returns what was seen, one record per line, fields separated by tabs.
const char* cpu_device_check_end();
}
