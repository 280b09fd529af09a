// The checker: sees every load, store, atomic and barrier of a kernel, counts what it asks memory for, and
// finds what compute-sanitizer's memcheck, initcheck, racecheck and synccheck find.
//
// A kernel compiled with -fsanitize=thread calls __tsan_read4(address) and its like before each access. Here
// these functions are our own. Each does two things:
//   1. Looks the address up. Every element of device memory and every word of shared memory has a cell that
//      remembers who touched it last; from it follow races, reads of what was never written, and which bytes
//      were touched at all. None of it depends on the order in which the CPU device runs threads and blocks:
//      a race is found whoever comes first, and a read of nothing that turns out to race with the write is a
//      race.
//   2. Appends (instruction, address) to the thread's log. At a barrier the logs of a warp's lanes are merged
//      into warp requests: the lanes step together, those at the lowest instruction first, as a GPU's lanes
//      do; at the end of a loop they wait for those that are still within. A request of 32 lanes then tells
//      32-byte sectors and bank conflicts.
//
// A check runs on one OS thread, so nothing here is locked.
#include "../checker.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <tuple>
#include <vector>

extern __thread uint3 threadIdx;
extern __thread uint3 blockIdx;
extern thread_local unsigned char fa2_dynamic_smem[];

// What runs at each access is compiled into each hook, for its kind of access.
#define ALWAYS_INLINE [[gnu::always_inline]] inline

namespace cpu_device {

namespace checker {
namespace {

enum Kind : unsigned { kRead, kWrite, kAtomic, kMemset };
constexpr const char* kKindNames[] = {"read", "write", "atomic", "memset"};

constexpr int kWarpSize = 32;
constexpr uintptr_t kSectorBytes = 32;
constexpr uintptr_t kNumBanks = 32, kBankBytes = 4;
constexpr uintptr_t kPageBytes = 256;  // regions start on different pages
constexpr size_t kMaxArenaBytes = size_t(1) << 31;
constexpr uintptr_t kMaxLibraryBytes = 1 << 26;  // a log entry has 26 bits for an instruction
constexpr size_t kLogEntries = 4096;             // of one thread
constexpr size_t kMaxFindings = 1000;            // different ones
constexpr uint32_t kAtLoopEnd = 63;              // in place of size and kind
constexpr uintptr_t kNearShared = 1 << 16;       // so far from an array an access may be one of its
constexpr int kOutside = 0;                      // no region
constexpr int kDynamicShared = -1;               // static array i is kDynamicShared - 1 - i

// ---------------------------------------------------------------- what is remembered of a location

// Within one block. `interval` counts the stretches between block barriers, over all blocks of the check:
// accesses of different threads in one interval are ordered only by __syncwarp and named barriers. `step` counts a thread's
// accesses in its interval: of two that race, the one with fewer steps is called the first.
constexpr uint16_t kNobody = 0xffff;

// Threads that did the same in one interval: those of one warp as a set of lanes, and one of another warp. With
// named barriers, of which some warps may know and others not, groups form a list instead: each is of one warp
// and one clock, and `other_pc` is the number of the next in state.groups.
struct Group {
  uint32_t interval = 0, pc = 0, clock = 0, lanes = 0, step = 0;
  uint16_t warp = 0, other_thread = kNobody;
  uint32_t other_pc = 0, other_step = 0;
};

enum CopyKind : uint8_t { kNoCopy, kAsyncCopy, kBulkCopy };  // cp.async; TMA

struct Cell {
  uint32_t write_interval = 0, write_pc = 0, write_clock = 0, write_step = 0;
  uint16_t write_thread = 0;
  CopyKind copy = kNoCopy;   // the write is of an asynchronous copy
  bool needs_fence = false;  // it is a thread's own, which a wgmma sees only after a fence
  Group readers;
  uint32_t adders = 0;          // number of a group in state.groups; 0 is none
  uint32_t raced_interval = 0;  // in which a race was found
};

template <typename T>
std::vector<T> repeated(const std::vector<T>& cells, size_t times) {
  std::vector<T> result;
  result.reserve(cells.size() * times);
  for (const T& cell : cells) result.insert(result.end(), times, cell);
  return result;
}

struct alignas(64) SharedCell {  // one cache line
  Cell cell;
  uint32_t written_block = 0;  // serial number of the block that wrote it last
};

// Shared memory has a cell for every 4 bytes, until a kernel touches smaller pieces: two 16-bit numbers in one
// word are two locations.
struct SharedMemory {
  size_t bytes = 0;
  int log2_unit = 2;
  std::vector<SharedCell> cells;
  std::vector<uint32_t>
      copies;  // on their way to each 16 bytes, by number in state.copies; empty at first

  explicit SharedMemory(size_t bytes) : bytes(bytes), cells((bytes + 3) / 4) {}

  void refine(int log2_smaller) {
    cells = repeated(cells, size_t(1) << (log2_unit - log2_smaller));
    log2_unit = log2_smaller;
  }
};

// A block of the launch, counted from 1 (0 is none), and the thread and instruction of it that was seen.
struct Visitor {
  uint32_t block = 0, pc = 0;
  uint16_t thread = 0;
};

// An asynchronous copy that has not arrived.
struct Copy {
  uint32_t interval, pc, step;
  uint16_t thread;
  CopyKind kind;
};

// What is known of other threads through an mbarrier: [thread]. `arrived` collects what those that arrive know,
// `released` is what those that wait for a complete phase learn.
struct MBarrierClocks {
  std::vector<uint32_t> arrived, released;
};

// 16 bytes that a wgmma under way reads for a thread.
struct ProductRead {
  uintptr_t offset;
  uint32_t pc;
  uint64_t group;
};

// What a thread has issued, and its last fence between what it wrote and what reads through the other proxy.
struct AsyncThread {
  uint64_t num_committed = 0;
  std::vector<ProductRead> reads;
  uint32_t fenced_clock = 0;
};

// Between the blocks of a launch nothing is ordered.
struct GlobalCell {
  Cell cell;
  bool is_valid = true, is_written = false;
  // What the blocks of one launch did. Of readers and adders two different blocks are kept.
  struct {
    uint32_t launch = 0;
    bool is_read = false, is_changed = false, has_raced = false;
    Visitor reader, other_reader, writer, adder, other_adder;
  } blocks;
};

struct Region {
  std::string name;
  uintptr_t offset;  // of its first byte in the arena
  size_t bytes;
  size_t item_bytes;
  bool is_read_only;
  size_t cell_bytes;  // an element's, until a kernel touches smaller pieces
  std::vector<GlobalCell> cells;
  uint64_t unique_read = 0, unique_written = 0;  // bytes, by this launch

  void refine(size_t smaller) {
    cells = repeated(cells, cell_bytes / smaller);
    cell_bytes = smaller;
  }
};

// ---------------------------------------------------------------- what is reported

// Requests of one instruction to one region.
struct Requests {
  uint32_t pc;
  int region;
  Kind kind;
  int bytes;  // per lane
  uint64_t count = 0, lanes = 0;
  uint64_t transactions = 0;      // sectors in global memory, wavefronts in shared memory
  unsigned worst = 0;             // transactions of one request
  std::vector<uint32_t> example;  // the addresses of the worst request, by lane
};

struct Observation {
  std::string tool, what;
  uint32_t pc = 0, other_pc = 0;  // offsets in the library; 0 is unknown
  std::string site;               // "file:line" where no pc is known
  int region = kOutside;
  uint64_t offset = 0;  // of the byte in its region
  int bytes = 0;
  uint3 block{}, thread{};
  uint3 other_block{}, other_thread{};  // of a race
  std::string text;
  uint64_t count = 1;
  int launch = 0;
};

using FindingKey = std::tuple<std::string, std::string, uint32_t, uint32_t, int, int, std::string>;

struct Log {
  std::vector<uint64_t> entries;
  uint64_t* end = nullptr;
  uint32_t num_drained = 0;  // merged since the last block barrier
  uint32_t last_meta = 0;  // of the entry merged last, since the thread last met others; 0 is none
};

// A read of memory that nothing had written. If the write comes later in the same interval (for device
// memory: in the same launch) and nothing orders the two, the mistake is the race, which is reported.
struct ReadOfNothing {
  int region;
  uint64_t offset;
  uint32_t interval;
  Observation finding;
};

// ---------------------------------------------------------------- the state of the check

// What a hook needs, together.
struct Now {
  // Of the fiber that runs; no bytes while none does. Another OS thread may meanwhile run host code of a
  // checked library: what is not called on this stack is not the kernel's.
  uintptr_t stack, stack_bytes;
  uintptr_t shared, arena, arena_bytes, code;
  uint64_t *log, *log_start, *log_limit;
  uint32_t num_drained;  // entries that left the running thread's log
  uint32_t interval;
  uint16_t thread, warp, lane;
  uint32_t* clocks;  // of the running thread: how far it knows each lane of its warp to be
  const uint32_t*
      known;  // of its warp: how far it knows each thread to be; null without named barriers
  uint32_t num_copies;  // that have not arrived, of the block
  uint32_t block;       // serial number in the check
  uint32_t block_in_launch;
} now;

struct State {
  bool active = false;
  std::string output;  // finished records
  std::vector<Region> regions;
  std::vector<uint16_t> pages;  // region of each page of the arena
  SharedMemory dynamic_shared{kMaxSharedBytes};
  std::vector<SharedMemory> static_shared;
  std::deque<Group>
      groups;  // threads that added to one cell, and more of those that read; the first is none
  std::vector<Copy> copies;  // of the block; the first is none

  const Library* library = nullptr;
  uintptr_t kernel = 0;
  const std::vector<Loop>* loops = nullptr;
  uintptr_t closure = 0, closure_bytes = 0;
  uintptr_t static_base = 0;
  int launch = 0;
  int num_threads = 0;
  size_t dynamic_bytes = 0;
  uint32_t block_serial = 0;
  uint32_t interval = 0;
  uint32_t first_interval = 0;  // of the block
  std::vector<Log> logs;
  std::vector<uint32_t> clocks;  // [thread][lane of its warp]
  // What a sync of a named barrier lets a warp know: [warp][thread], and for each barrier under way [thread].
  // Empty where the library calls none.
  std::vector<uint32_t> known, arrived[16];
  std::vector<MBarrierClocks> mbarriers;   // of the block, by number
  std::vector<AsyncThread> async_threads;  // of the block
  int logging = -1;                        // thread whose log `now` writes

  std::vector<Requests> requests;
  std::map<std::pair<uint32_t, std::pair<int, int>>, size_t> requests_of;
  std::map<std::pair<std::string, const char*>, uint64_t> barriers;  // (site, of what) -> times

  std::vector<Observation> findings;
  std::map<FindingKey, size_t> finding_of;
  std::vector<ReadOfNothing> reads_of_nothing;
} state;

volatile bool is_late = false;  // the block is past its time limit

uint32_t pc_of(const void* return_address) {
  return uint32_t(reinterpret_cast<uintptr_t>(return_address) - now.code);
}

std::string text_of(Site site) {
  return site.file == nullptr ? "" : std::string(site.file) + ":" + std::to_string(site.line);
}

std::string text_of(uint3 v) {
  return std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z);
}

void add_finding(Observation finding) {
  finding.launch = state.launch;
  const FindingKey key{finding.tool,   finding.what,   finding.pc,  finding.other_pc,
                       finding.region, finding.launch, finding.site};
  const auto [place, is_new] = state.finding_of.try_emplace(key, state.findings.size());
  if (!is_new) {
    ++state.findings[place->second].count;
  } else if (state.findings.size() < kMaxFindings) {
    state.findings.push_back(std::move(finding));
  } else {
    state.finding_of.erase(place);
  }
}

uint3 thread_index(int thread) {
  return {thread % blockDim.x, thread / blockDim.x % blockDim.y,
          thread / (blockDim.x * blockDim.y)};
}

uint3 block_index(uint32_t block) {
  return {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
}

Observation observe(const char* tool, const char* what, uint32_t pc, int region, uint64_t offset,
                    size_t bytes) {
  Observation finding;
  finding.tool = tool;
  finding.what = what;
  finding.pc = pc;
  finding.region = region;
  finding.offset = offset;
  finding.bytes = int(bytes);
  finding.block = blockIdx;
  finding.thread = threadIdx;
  return finding;
}

[[gnu::cold]] void found(const char* tool, const char* what, uint32_t pc, int region,
                         uint64_t offset, size_t bytes) {
  add_finding(observe(tool, what, pc, region, offset, bytes));
}

// ---------------------------------------------------------------- races

// Whether the running thread is after `clock` of another thread: only lanes that met it in a __syncwarp are,
// and warps that have heard of it through named barriers.
bool is_after(int thread, uint32_t clock) {
  if (thread / kWarpSize == now.warp) return now.clocks[thread % kWarpSize] >= clock;
  return now.known != nullptr && now.known[thread] >= clock;
}

uint32_t step_of_now() {
  return now.num_drained + uint32_t(now.log - now.log_start);
}

// An access of another thread, or block, that the running thread's is not ordered with.
struct Conflict {
  const char* what = nullptr;
  uint32_t pc = 0;
  int thread = 0;
  bool is_first = true;  // it, and not the running thread's
  uint32_t block = 0;    // of the launch, counted from 1; 0 is the running thread's
};

[[gnu::cold]] void found_race(const Conflict& conflict, uint32_t pc, int region, uint64_t offset,
                              size_t bytes) {
  Observation finding = observe("racecheck", conflict.what, pc, region, offset, bytes);
  finding.other_pc = conflict.pc;
  finding.other_block = conflict.block == 0 ? blockIdx : block_index(conflict.block - 1);
  finding.other_thread = thread_index(conflict.thread);
  if (!conflict.is_first) {
    std::swap(finding.pc, finding.other_pc);
    std::swap(finding.block, finding.other_block);
    std::swap(finding.thread, finding.other_thread);
  }
  add_finding(std::move(finding));
}

// The next group of a list, or null.
Group* next_of(const Group& group) {
  return group.other_pc == 0 ? nullptr : &state.groups[group.other_pc];
}

void find_unordered_in_list(const Group& first, Conflict& conflict, uint32_t& step) {
  for (const Group* group = &first; group != nullptr; group = next_of(*group)) {
    if (group->interval != now.interval) continue;
    for (unsigned lanes = group->lanes; lanes != 0; lanes &= lanes - 1) {
      const int thread = group->warp * kWarpSize + __builtin_ctz(lanes);
      if (thread == now.thread || is_after(thread, group->clock)) continue;
      conflict = {"", group->pc, thread};
      step = group->step;
      return;
    }
  }
}

// A thread keeps its last access only: who is after that is after those before.
void add_to_list(Group& first, uint32_t pc) {
  const uint32_t clock = now.clocks[now.lane], self = 1u << now.lane;
  Group *own = nullptr, *unused = nullptr, *last = nullptr;
  for (Group* group = &first; group != nullptr; group = next_of(*group)) {
    last = group;
    const bool is_current = group->interval == now.interval;
    if (is_current && group->warp == now.warp) {
      if (group->clock == clock) {
        own = group;
        continue;
      }
      group->lanes &= ~self;
    }
    if (!is_current || group->lanes == 0) unused = group;
  }
  if (own == nullptr) {
    if (unused == nullptr) {
      last->other_pc = uint32_t(state.groups.size());
      unused = &state.groups.emplace_back();
    }
    own = unused;
    own->interval = now.interval;
    own->clock = clock;
    own->lanes = 0;
    own->warp = now.warp;
  }
  own->lanes |= self;
  own->pc = pc;
  own->step = step_of_now();
}

// A thread of the group that the running thread is not ordered with, in `conflict`.
void find_unordered(const Group& group, Conflict& conflict, uint32_t& step) {
  if (now.known != nullptr) return find_unordered_in_list(group, conflict, step);
  int thread = kNobody;
  if (group.warp != now.warp) {
    thread = group.warp * kWarpSize + __builtin_ctz(group.lanes);
  } else {
    for (unsigned lanes = group.lanes & ~(1u << now.lane); lanes != 0; lanes &= lanes - 1) {
      const int lane = now.warp * kWarpSize + __builtin_ctz(lanes);
      if (!is_after(lane, group.clock)) thread = lane;
    }
  }
  const bool is_other = thread == kNobody;
  if (is_other && group.other_thread == kNobody) return;
  conflict.thread = is_other ? group.other_thread : thread;
  conflict.pc = is_other ? group.other_pc : group.pc;
  step = is_other ? group.other_step : group.step;
  conflict.what = "";
}

ALWAYS_INLINE void add_to_group(Group& group, uint32_t pc) {
  if (now.known != nullptr) return add_to_list(group, pc);
  const uint32_t clock = now.clocks[now.lane];
  if (group.interval != now.interval) {
    group = {now.interval, pc, clock, 1u << now.lane, step_of_now(), now.warp, kNobody, 0, 0};
  } else if (group.warp == now.warp) {
    bool all_before = clock > group.clock;
    for (unsigned lanes = group.lanes; all_before && lanes != 0; lanes &= lanes - 1) {
      all_before = is_after(now.warp * kWarpSize + __builtin_ctz(lanes), group.clock);
    }
    if (all_before) group.lanes = 0;
    // Of different clocks the smallest is kept: a race may go unseen, none is made up.
    group.clock = all_before ? clock : std::min(group.clock, clock);
    group.lanes |= 1u << now.lane;
    group.pc = pc;
    group.step = step_of_now();
  } else if (group.other_thread == kNobody) {
    group.other_thread = now.thread;
    group.other_pc = pc;
    group.other_step = step_of_now();
  }
}

Group& adders_of(Cell& cell) {
  if (cell.adders == 0) {
    cell.adders = uint32_t(state.groups.size());
    state.groups.emplace_back();
  }
  return state.groups[cell.adders];
}

// An access to what a copy may still be writing.
const char* name_of_access(CopyKind copy, bool is_read) {
  if (copy == kBulkCopy) return is_read ? "read of a bulk copy" : "write to a bulk copy";
  return is_read ? "read of a copy" : "write to a copy";
}

// Records an access of the running thread; returns the access of another thread of the block that it is not
// ordered with, if there is one and one of the two writes. `copy`: it is that of an asynchronous copy.
ALWAYS_INLINE Conflict record(Cell& cell, Kind kind, uint32_t pc, CopyKind copy = kNoCopy) {
  Conflict conflict;
  uint32_t step = 0;
  bool other_reads = false;
  CopyKind other_copy = kNoCopy;
  if (cell.write_interval == now.interval && cell.write_thread != now.thread &&
      !is_after(cell.write_thread, cell.write_clock)) {
    conflict = {"", cell.write_pc, cell.write_thread};
    step = cell.write_step;
    other_copy = cell.copy;
  }
  if (kind != kAtomic && cell.adders != 0 && conflict.what == nullptr &&
      (now.known != nullptr || state.groups[cell.adders].interval == now.interval)) {
    find_unordered(state.groups[cell.adders], conflict, step);
  }
  if (kind != kRead && conflict.what == nullptr &&
      (now.known != nullptr || cell.readers.interval == now.interval)) {
    find_unordered(cell.readers, conflict, step);
    other_reads = true;
  }
  if (conflict.what != nullptr) {
    cell.raced_interval = now.interval;
    const uint32_t self = step_of_now();
    if (kind != kRead && !other_reads) {
      conflict.what = "write after write";
      conflict.is_first = step != self ? step < self : conflict.pc <= pc;
    } else {
      conflict.is_first = step != self ? step < self : kind == kRead;
      const bool read_is_first = conflict.is_first == other_reads;
      conflict.what = read_is_first ? "write after read" : "read after write";
    }
    if (const CopyKind first = conflict.is_first ? other_copy : copy; first != kNoCopy) {
      conflict.what = name_of_access(first, kind == kRead || other_reads);
    }
  }
  if (kind == kRead) {
    add_to_group(cell.readers, pc);
  } else if (kind == kAtomic) {
    add_to_group(adders_of(cell), pc);
  } else {
    cell.write_interval = now.interval;
    cell.write_pc = pc;
    cell.write_clock = now.clocks[now.lane];
    cell.write_step = step_of_now();
    cell.write_thread = now.thread;
    cell.copy = copy;
    cell.needs_fence = copy != kBulkCopy;
  }
  return conflict;
}

// The same between blocks.
Conflict record_between_blocks(GlobalCell& cell, Kind kind, uint32_t pc) {
  auto& blocks = cell.blocks;
  const Visitor self{now.block_in_launch + 1, pc, now.thread};
  Conflict conflict;
  const auto conflicts = [&](const char* what, const Visitor& other, bool is_first) {
    if (other.block != 0 && other.block != self.block && conflict.what == nullptr) {
      conflict = {what, other.pc, other.thread, is_first, other.block};
    }
  };
  const Visitor& reader = blocks.reader.block == self.block ? blocks.other_reader : blocks.reader;
  const Visitor& adder = blocks.adder.block == self.block ? blocks.other_adder : blocks.adder;
  switch (kind) {
    case kRead:
      conflicts("one block reads, another writes", blocks.writer, false);
      conflicts("one block reads, another adds", adder, false);
      break;
    case kAtomic:
      conflicts("one block writes, another adds", blocks.writer, true);
      conflicts("one block reads, another adds", reader, true);
      break;
    default:
      conflicts("two blocks write", blocks.writer, blocks.writer.pc <= pc);
      conflicts("one block writes, another adds", adder, false);
      conflicts("one block reads, another writes", reader, true);
  }
  if (conflict.what != nullptr) blocks.has_raced = true;
  const auto keep_two = [&](Visitor& first, Visitor& second) {
    if (first.block == 0) {
      first = self;
    } else if (first.block != self.block && second.block == 0) {
      second = self;
    }
  };
  if (kind == kRead) {
    keep_two(blocks.reader, blocks.other_reader);
  } else if (kind == kAtomic) {
    keep_two(blocks.adder, blocks.other_adder);
  } else {
    blocks.writer = self;
  }
  return conflict;
}

// ---------------------------------------------------------------- reads of what nothing has written

[[gnu::cold]] void note_read_of_nothing(Kind kind, uint32_t pc, int region, uint64_t offset,
                                        size_t bytes) {
  state.reads_of_nothing.push_back(
      {region, offset, now.interval,
       observe("initcheck", kKindNames[kind], pc, region, offset, bytes)});
}

SharedMemory& shared_memory(int region) {
  return region == kDynamicShared ? state.dynamic_shared
                                  : state.static_shared[kDynamicShared - 1 - region];
}

// Reports those reads of shared memory (at the end of an interval) or of device memory (at the end of a
// launch) that no race explains.
void report_reads_of_nothing(bool is_shared) {
  if (state.reads_of_nothing.empty()) return;
  std::vector<ReadOfNothing> rest;
  for (ReadOfNothing& read : state.reads_of_nothing) {
    if ((read.region < 0) != is_shared) {
      rest.push_back(std::move(read));
      continue;
    }
    bool has_raced;
    if (is_shared) {
      const SharedMemory& memory = shared_memory(read.region);
      has_raced =
          memory.cells[read.offset >> memory.log2_unit].cell.raced_interval == read.interval;
    } else {
      const Region& region = state.regions[read.region];
      const GlobalCell& cell = region.cells[read.offset / region.cell_bytes];
      has_raced = cell.blocks.has_raced || cell.cell.raced_interval == read.interval;
    }
    if (!has_raced) add_finding(std::move(read.finding));
  }
  state.reads_of_nothing = std::move(rest);
}

// ---------------------------------------------------------------- one access

void append_to_log(uint32_t pc, Kind kind, unsigned bytes, uint32_t location) {
  const unsigned log2_bytes = __builtin_ctz(bytes);
  *now.log++ = uint64_t(pc << 6 | log2_bytes << 2 | kind) << 32 | location;
}

bool is_multiple(uintptr_t address, size_t power_of_two) {
  return (address & (power_of_two - 1)) == 0;
}

// An access to the destination of a copy that may be under way, although a barrier comes between.
[[gnu::cold]] void found_copy_under_way(const Copy& copy, Kind kind, uint32_t pc, int region,
                                        uint64_t offset, size_t bytes) {
  const char* what = name_of_access(copy.kind, kind == kRead);
  found_race({what, copy.pc, copy.thread, true}, pc, region, offset, bytes);
}

ALWAYS_INLINE void touch_shared(SharedMemory& memory, int region, uintptr_t offset, size_t bytes,
                                Kind kind, uint32_t pc, bool is_aligned, CopyKind copy = kNoCopy) {
  if (!is_aligned) found("memcheck", "misaligned", pc, region, offset, bytes);
  if (__builtin_expect(bytes >> memory.log2_unit == 0 || !is_aligned, false)) {
    const int log2_smaller = is_aligned ? __builtin_ctzl(bytes) : 0;
    if (log2_smaller < memory.log2_unit) memory.refine(log2_smaller);
  }
  const uintptr_t last = (offset + bytes - 1) >> memory.log2_unit;
  for (uintptr_t unit = offset >> memory.log2_unit; unit <= last; ++unit) {
    SharedCell& shared = memory.cells[unit];
    const uintptr_t start = unit << memory.log2_unit;
    if (kind != kWrite && shared.written_block != now.block) {
      note_read_of_nothing(kind, pc, region, start, bytes);
      shared.written_block = now.block;  // once is enough
    }
    if (kind != kRead) shared.written_block = now.block;
    const Conflict conflict = record(shared.cell, kind, pc, copy);
    if (conflict.what != nullptr) {
      found_race(conflict, pc, region, start, bytes);
    } else if (__builtin_expect(now.num_copies > 0, false) && !memory.copies.empty()) {
      const uint32_t under_way = memory.copies[start / 16];
      if (under_way != 0) {
        found_copy_under_way(state.copies[under_way], kind, pc, region, start, bytes);
      }
    }
  }
}

void touch_global(uintptr_t offset, size_t bytes, Kind kind, uint32_t pc, bool is_aligned) {
  const int index = state.pages[offset / kPageBytes];
  Region& region = state.regions[index];
  const uintptr_t start = offset - region.offset;
  if (index == kOutside || offset < region.offset || start + bytes > region.bytes) {
    found("memcheck", kKindNames[kind], pc, kOutside, offset, bytes);
    return;
  }
  if (!is_aligned) found("memcheck", "misaligned", pc, index, start, bytes);
  if (kind != kRead && region.is_read_only) {
    found("memcheck", "write to an input", pc, index, start, bytes);
    return;
  }
  if (__builtin_expect(bytes < region.cell_bytes, false)) {
    region.refine(bytes);
  }
  for (uintptr_t i = start / region.cell_bytes; i * region.cell_bytes < start + bytes; ++i) {
    GlobalCell& cell = region.cells[i];
    const uintptr_t item = i * region.cell_bytes;
    if (!cell.is_valid) {
      found("memcheck", kKindNames[kind], pc, index, item, bytes);
      continue;
    }
    if (cell.blocks.launch != uint32_t(state.launch)) {
      cell.blocks = {};
      cell.blocks.launch = uint32_t(state.launch);
    }
    if (kind != kWrite && !cell.is_written) {
      note_read_of_nothing(kind, pc, index, item, bytes);
      cell.is_written = true;  // once is enough
    }
    if (kind != kRead) cell.is_written = true;
    bool& is_touched = kind == kRead ? cell.blocks.is_read : cell.blocks.is_changed;
    if (!is_touched) {
      is_touched = true;
      (kind == kRead ? region.unique_read : region.unique_written) += region.cell_bytes;
    }
    Conflict conflict = record(cell.cell, kind, pc);
    if (conflict.what != nullptr) found_race(conflict, pc, index, item, bytes);
    conflict = record_between_blocks(cell, kind, pc);
    if (conflict.what != nullptr) found_race(conflict, pc, index, item, bytes);
  }
}

// An access that would not stay within what the check owns ends the block.
[[noreturn]] void found_beyond(Kind kind, uint32_t pc, int region, uint64_t offset, size_t bytes) {
  found("memcheck", kKindNames[kind], pc, region, offset, bytes);
  abandon_checked_block();
}

// Shared memory at an address, and the offset in it. Null if there is none, or fewer bytes of it.
SharedMemory* find_shared(uintptr_t address, size_t bytes, int& region, uintptr_t& offset) {
  offset = address - now.shared;
  if (offset + bytes <= state.dynamic_bytes && offset < kMaxSharedBytes) {
    region = kDynamicShared;
    return &state.dynamic_shared;
  }
  const auto& arrays = state.library->shared_arrays;
  for (size_t i = 0; i < arrays.size(); ++i) {
    offset = address - (state.static_base + arrays[i].offset);
    region = kDynamicShared - 1 - int(i);
    if (offset < arrays[i].bytes && offset + bytes <= arrays[i].bytes) {
      return &state.static_shared[i];
    }
  }
  return nullptr;
}

// Neither device memory nor dynamic shared memory nor the thread's own stack.
[[gnu::noinline]] void touch_other(uintptr_t address, size_t bytes, Kind kind, uint32_t pc,
                                   CopyKind copy) {
  const auto& arrays = state.library->shared_arrays;
  const uintptr_t dynamic_offset = address - now.shared;
  uintptr_t nearest_distance = std::min(dynamic_offset - kMaxSharedBytes, -dynamic_offset);
  uintptr_t nearest_offset = dynamic_offset;
  int nearest = kDynamicShared;
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (arrays[i].owner != 0 && arrays[i].owner != state.kernel) continue;  // another kernel's
    const uintptr_t offset = address - (state.static_base + arrays[i].offset);
    const int region = kDynamicShared - 1 - int(i);
    if (offset < arrays[i].bytes && offset + bytes <= arrays[i].bytes) {
      touch_shared(state.static_shared[i], region, offset, bytes, kind, pc,
                   is_multiple(address, bytes), copy);
      append_to_log(pc, kind, unsigned(bytes), 3u << 30 | uint32_t(i) << 20 | uint32_t(offset));
      return;
    }
    const uintptr_t distance = std::min(offset - arrays[i].bytes, -offset);
    if (distance < nearest_distance || offset < arrays[i].bytes) {
      nearest = region;
      nearest_offset = offset;
      nearest_distance = offset < arrays[i].bytes ? 0 : distance;
    }
  }
  if (nearest_distance > kNearShared) nearest = kOutside;
  for (const size_t guard : state.library->guards) {
    if (address == state.static_base + guard) return;
  }
  if (kind == kRead) {
    // The launch's arguments, constants, and what the runtime keeps for the thread (threadIdx ...).
    if (address - state.closure < state.closure_bytes) return;
    for (const uint3* builtin : {&threadIdx, &blockIdx, &blockDim, &gridDim}) {
      if (address - reinterpret_cast<uintptr_t>(builtin) < sizeof(uint3)) return;
    }
    Dl_info info;
    if (dladdr(reinterpret_cast<const void*>(address), &info) != 0) return;
  }
  found_beyond(kind, pc, nearest, nearest == kOutside ? address - now.arena : nearest_offset,
               bytes);
}

ALWAYS_INLINE void access(uintptr_t address, size_t bytes, Kind kind, const void* return_address,
                          CopyKind copy = kNoCopy) {
  if (reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) - now.stack >= now.stack_bytes)
    return;
  if (address - now.stack < now.stack_bytes) return;
  const uint32_t pc = pc_of(return_address);
  uintptr_t offset = address - now.shared;
  if (offset < kMaxSharedBytes) {
    if (offset + bytes <= state.dynamic_bytes) {
      touch_shared(state.dynamic_shared, kDynamicShared, offset, bytes, kind, pc,
                   is_multiple(address, bytes), copy);
    } else if (offset + bytes <= kMaxSharedBytes) {
      found("memcheck", kKindNames[kind], pc, kDynamicShared, offset, bytes);
    } else {
      found_beyond(kind, pc, kDynamicShared, offset, bytes);
    }
    append_to_log(pc, kind, unsigned(bytes), 1u << 31 | uint32_t(offset));
  } else if ((offset = address - now.arena) < now.arena_bytes) {
    touch_global(offset, bytes, kind, pc, is_multiple(address, bytes));
    append_to_log(pc, kind, unsigned(bytes), uint32_t(offset));
  } else {
    touch_other(address, bytes, kind, pc, copy);
  }
  if (__builtin_expect(is_late, false)) abandon_late_block();
  if (__builtin_expect(now.log >= now.log_limit, false)) wait_for_log_space();
}

// An access of any size and alignment, in equal pieces that one instruction can do. Their size divides the
// address and the whole, so it is the same for every element of an array.
void access_range(uintptr_t address, size_t bytes, Kind kind, const void* return_address) {
  if (bytes == 0) return;
  const size_t piece = std::min<size_t>(16, (address | bytes) & -(address | bytes));
  for (; bytes > 0; bytes -= piece, address += piece) access(address, piece, kind, return_address);
}

// ---------------------------------------------------------------- warp requests

// Distinct sectors that a request touches.
unsigned count_sectors(const uint32_t* locations, int n, unsigned bytes) {
  uint32_t sectors[2 * kWarpSize];
  int count = 0;
  bool is_sorted = true;
  for (int i = 0; i < n; ++i) {
    for (uint32_t sector = locations[i] / kSectorBytes;
         sector <= (locations[i] + bytes - 1) / kSectorBytes; ++sector) {
      if (count > 0 && sectors[count - 1] == sector) continue;
      is_sorted = is_sorted && (count == 0 || sectors[count - 1] < sector);
      sectors[count++] = sector;
    }
  }
  if (is_sorted) return unsigned(count);
  std::sort(sectors, sectors + count);
  return unsigned(std::unique(sectors, sectors + count) - sectors);
}

// Whether all lanes are at one word, or no two at one bank: most requests of a word a lane are so.
bool is_one_wavefront(const uint32_t* locations, int n, unsigned bytes) {
  const uint32_t first = locations[0] / kBankBytes;
  uint32_t banks = 0;
  bool is_one_word = true, are_apart = true;
  for (int i = 0; i < n; ++i) {
    const uint32_t word = locations[i] / kBankBytes, bank = 1u << word % kNumBanks;
    if (word != (locations[i] + bytes - 1) / kBankBytes) return false;
    is_one_word = is_one_word && word == first;
    are_apart = are_apart && (banks & bank) == 0;
    banks |= bank;
  }
  return is_one_word || are_apart;
}

// Passes over the banks: as many as the bank with the most distinct words has. 8-byte accesses go by half
// warps, 16-byte accesses by quarters.
unsigned count_wavefronts(const uint32_t* locations, const int* lanes, int n, unsigned bytes) {
  if (bytes <= kBankBytes && is_one_wavefront(locations, n, bytes)) return 1;
  const int group = bytes <= 4 ? kWarpSize : bytes == 8 ? kWarpSize / 2 : kWarpSize / 4;
  unsigned wavefronts = 0;
  for (int i = 0; i < n;) {
    const int end = (lanes[i] / group + 1) * group;
    uint32_t words[kNumBanks][kWarpSize];
    uint8_t used[kNumBanks] = {};
    unsigned most = 1;
    for (; i < n && lanes[i] < end; ++i) {
      for (uint32_t word = locations[i] / kBankBytes;
           word <= (locations[i] + bytes - 1) / kBankBytes; ++word) {
        const uint32_t bank = word % kNumBanks;
        unsigned j = 0;
        while (j < used[bank] && words[bank][j] != word) ++j;
        if (j < used[bank]) continue;
        words[bank][used[bank]++] = word;
        most = std::max<unsigned>(most, used[bank]);
      }
    }
    wavefronts += most;
  }
  return wavefronts;
}

int region_of(uint32_t location) {
  if (location >> 30 == 3) return kDynamicShared - 1 - int(location >> 20 & 0x3ff);
  if (location >> 31 != 0) return kDynamicShared;
  const int index = state.pages[location / kPageBytes];
  const Region& region = state.regions[index];
  return location >= region.offset && location < region.offset + region.bytes ? index : kOutside;
}

void count_request(uint32_t meta, int region, const uint32_t* locations, const int* lanes, int n) {
  if (region == kOutside) return;
  const auto kind = Kind(meta & 3);
  const unsigned bytes = 1u << (meta >> 2 & 15);
  const uint32_t pc = meta >> 6;
  static uint32_t last_meta;
  static int last_region, last_launch;
  static size_t last;
  if (meta != last_meta || region != last_region || state.launch != last_launch ||
      last >= state.requests.size()) {
    const auto [place, is_new] = state.requests_of.try_emplace(
        {pc, {region, int(kind) << 8 | int(bytes)}}, state.requests.size());
    if (is_new) state.requests.push_back({pc, region, kind, int(bytes), 0, 0, 0, 0, {}});
    last = place->second;
    last_meta = meta;
    last_region = region;
    last_launch = state.launch;
  }
  Requests& requests = state.requests[last];
  const bool is_shared = region < 0;
  const unsigned transactions =
      is_shared ? count_wavefronts(locations, lanes, n, bytes) : count_sectors(locations, n, bytes);
  ++requests.count;
  requests.lanes += unsigned(n);
  requests.transactions += transactions;
  if (transactions > requests.worst) {
    requests.worst = transactions;
    requests.example.assign(kWarpSize, ~0u);
    const uint32_t base = is_shared ? 0 : uint32_t(state.regions[region].offset);
    const uint32_t mask = region == kDynamicShared ? ~(1u << 31) : is_shared ? 0xfffffu : ~0u;
    for (int i = 0; i < n; ++i) requests.example[lanes[i]] = (locations[i] & mask) - base;
  }
}

void merge_step(uint32_t meta, const uint32_t* locations, const int* lanes, int n) {
  const int region = region_of(locations[0]);
  bool is_one = true;
  if (region == kDynamicShared) {
    for (int i = 1; i < n; ++i) is_one = is_one && locations[i] >> 30 == 2;
  } else {
    for (int i = 1; i < n; ++i) is_one = is_one && region_of(locations[i]) == region;
  }
  if (is_one) return count_request(meta, region, locations, lanes, n);
  std::map<int, std::pair<std::vector<uint32_t>, std::vector<int>>> by_region;
  for (int i = 0; i < n; ++i) {
    auto& [some, of] = by_region[region_of(locations[i])];
    some.push_back(locations[i]);
    of.push_back(lanes[i]);
  }
  for (const auto& [part, request] : by_region) {
    count_request(meta, part, request.first.data(), request.second.data(),
                  int(request.first.size()));
  }
}

void save_log() {
  if (state.logging >= 0) state.logs[state.logging].end = now.log;
}

void resume_log() {
  if (state.logging < 0) return;
  const Log& log = state.logs[state.logging];
  now.log = log.end;
  now.num_drained = log.num_drained;
}

// Where a lane stands that has logged `last` and will log `next`: at that access; or at the jump back that
// leads to it; or, if the code after a loop lies before the loop, at the loop's end.
uint32_t find_position(uint32_t last, uint32_t next) {
  const uint32_t from = last >> 6, to = next >> 6;
  // One instruction may log several accesses: a read, then a write.
  if (last == 0 || to > from || (to == from && last < next)) return next;
  const auto& loops = *state.loops;
  auto loop = std::lower_bound(loops.begin(), loops.end(), from,
                               [](Loop l, uint32_t pc) { return l.last < pc; });
  uint32_t left = 0;  // the end of the outermost loop that is left
  for (; loop != loops.end(); ++loop) {
    if (loop->first <= to) return loop->last << 6 | kAtLoopEnd;
    if (loop->first <= from) left = loop->last;
  }
  return left == 0 ? next : (left + 1) << 6 | kAtLoopEnd;
}

// Merges the logs of the lanes `lanes` of a warp into requests. A log of `growing` lanes goes on later: when
// one of them runs out, merging has to wait for it.
void merge_logs(int first, unsigned lanes, unsigned growing) {
  save_log();
  uint64_t *next[kWarpSize], *end[kWarpSize];
  uint32_t last[kWarpSize], position[kWarpSize];  // ~0 where a log is at its end
  int of[kWarpSize];
  int n = 0;
  const auto meta = [&](int i) { return uint32_t(*next[i] >> 32); };
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    if (first + lane >= state.num_threads) break;
    Log& log = state.logs[first + lane];
    of[n] = lane;
    next[n] = log.entries.data();
    end[n] = log.end;
    last[n] = log.last_meta;
    position[n] = next[n] == end[n] ? ~0u : find_position(last[n], meta(n));
    ++n;
  }
  while (true) {
    uint32_t lowest = ~0u;
    for (int i = 0; i < n; ++i) lowest = std::min(lowest, position[i]);
    bool is_open = lowest != ~0u;
    for (int i = 0; growing != 0 && i < n; ++i) {
      if (position[i] == ~0u && (growing >> of[i] & 1u)) is_open = false;
    }
    if (!is_open) break;
    if ((lowest & kAtLoopEnd) == kAtLoopEnd) {
      for (int i = 0; i < n; ++i) {
        if (position[i] == lowest) position[i] = meta(i);
      }
      continue;
    }
    uint32_t locations[kWarpSize];
    int who[kWarpSize], count = 0;
    uint32_t common_next = 0,
             common_position = 0;  // lanes that step together mostly go on together
    for (int i = 0; i < n; ++i) {
      if (position[i] != lowest) continue;
      locations[count] = uint32_t(*next[i]++);
      who[count++] = of[i];
      last[i] = lowest;
      if (next[i] == end[i]) {
        position[i] = ~0u;
        continue;
      }
      if (meta(i) != common_next) {
        common_next = meta(i);
        common_position = find_position(lowest, common_next);
      }
      position[i] = common_position;
    }
    merge_step(lowest, locations, who, count);
  }
  for (int i = 0; i < n; ++i) {
    Log& log = state.logs[first + of[i]];
    std::copy(next[i], end[i], log.entries.data());
    log.num_drained += uint32_t(next[i] - log.entries.data());
    log.last_meta = growing != 0 ? last[i] : 0;
    log.end = log.entries.data() + (end[i] - next[i]);
  }
  resume_log();
}

// At a block barrier, where steps start over.
void merge_all_logs() {
  for (int first = 0; first < state.num_threads; first += kWarpSize) merge_logs(first, ~0u, 0);
  for (Log& log : state.logs) log.num_drained = 0;
  now.num_drained = 0;
}

void put(const std::string& record) {
  state.output += record + "\n";
}

std::string number(uint64_t n) {
  return std::to_string(n);
}

}  // namespace

// ---------------------------------------------------------------- called by the scheduler

bool active() {
  return state.active;
}

void start_launch(const Library& library, const void* kernel, const std::string& name,
                  const cudaLaunchConfig_t& config, const void* closure, size_t closure_bytes) {
  if (!state.active) return;
  ++state.launch;
  state.library = &library;
  state.kernel = reinterpret_cast<uintptr_t>(kernel);
  state.loops = &loops_of(library);
  state.closure = reinterpret_cast<uintptr_t>(closure);
  state.closure_bytes = closure_bytes;
  state.dynamic_bytes = config.dynamicSmemBytes;
  state.num_threads = int(config.blockDim.x * config.blockDim.y * config.blockDim.z);
  state.logs.resize(state.num_threads);
  for (Log& log : state.logs) {
    log.entries.resize(kLogEntries + 64);  // one access of a kernel may append a few entries
    log.end = log.entries.data();
  }
  state.static_base = 0;
  if (!library.shared_arrays.empty() || !library.guards.empty()) {
    state.static_base = reinterpret_cast<uintptr_t>(thread_local_block(library));
  }
  state.static_shared.clear();
  for (const SharedArray& array : library.shared_arrays) {
    state.static_shared.emplace_back(array.bytes);
  }
  now.shared = reinterpret_cast<uintptr_t>(fa2_dynamic_smem);
  now.code = library.base;
  put("launch\t" + number(state.launch) + "\t" + name + "\t" + text_of(uint3(config.gridDim)) +
      "\t" + text_of(uint3(config.blockDim)) + "\t" + number(config.dynamicSmemBytes) + "\t" +
      library.path);
  for (size_t i = 0; i < library.shared_arrays.size(); ++i) {
    put("array\t" + number(state.launch) + "\t" + number(i) + "\t" +
        number(library.shared_arrays[i].offset) + "\t" + library.shared_arrays[i].name + "\t" +
        number(library.shared_arrays[i].bytes));
  }
}

void end_launch() {
  if (!state.active) return;
  report_reads_of_nothing(false);
  const std::string launch = number(state.launch);
  for (const Requests& r : state.requests) {
    std::string record = "requests\t" + launch + "\t" + number(r.pc) + "\t" +
                         std::to_string(r.region) + "\t" + kKindNames[r.kind] + "\t" +
                         number(r.bytes) + "\t" + number(r.count) + "\t" + number(r.lanes) + "\t" +
                         number(r.transactions) + "\t" + number(r.worst) + "\t";
    for (int lane = 0; lane < kWarpSize; ++lane) {
      record += (lane > 0 ? "," : "") +
                (r.example[lane] == ~0u ? std::string() : number(r.example[lane]));
    }
    put(record);
  }
  state.requests.clear();
  state.requests_of.clear();
  for (const auto& [key, times] : state.barriers) {
    put("barrier\t" + launch + "\t" + key.first + "\t" + key.second + "\t" + number(times));
  }
  state.barriers.clear();
  for (size_t i = 1; i < state.regions.size(); ++i) {
    Region& region = state.regions[i];
    if (region.unique_read + region.unique_written > 0) {
      put("unique\t" + launch + "\t" + number(i) + "\t" + number(region.unique_read) + "\t" +
          number(region.unique_written));
    }
    region.unique_read = region.unique_written = 0;
  }
}

void start_block(uint64_t block) {
  if (!state.active) return;
  now.block = ++state.block_serial;
  now.block_in_launch = uint32_t(block);
  now.interval = state.first_interval = ++state.interval;
  state.clocks.assign(size_t(state.num_threads) * kWarpSize, 0);
  for (int thread = 0; thread < state.num_threads; ++thread) {
    state.clocks[thread * kWarpSize + thread % kWarpSize] = 1;
  }
  const size_t num_warps = size_t(state.num_threads + kWarpSize - 1) / kWarpSize;
  state.known.assign(state.library->calls_named_barriers ? num_warps * state.num_threads : 0, 0);
  for (std::vector<uint32_t>& arrived : state.arrived) {
    arrived.assign(state.known.empty() ? 0 : state.num_threads, 0);
  }
  state.mbarriers.clear();
  state.async_threads.assign(state.num_threads, {});
  state.copies.resize(1);
  now.num_copies = 0;
  const auto forget_copies = [](SharedMemory& memory) {
    std::fill(memory.copies.begin(), memory.copies.end(), 0);
  };
  forget_copies(state.dynamic_shared);
  std::for_each(state.static_shared.begin(), state.static_shared.end(), forget_copies);
  state.logging = -1;
  for (Log& log : state.logs) {
    log.end = log.entries.data();
    log.num_drained = log.last_meta = 0;
  }
}

void end_block() {
  is_late = false;
  if (!state.active) return;
  merge_all_logs();
  report_reads_of_nothing(true);
  now.stack_bytes = 0;
  state.logging = -1;
}

void enter_thread(int thread, const char* stack, size_t stack_bytes) {
  if (!state.active) return;
  save_log();
  state.logging = thread;
  now.thread = uint16_t(thread);
  now.warp = uint16_t(thread / kWarpSize);
  now.lane = uint16_t(thread % kWarpSize);
  now.clocks = &state.clocks[size_t(thread) * kWarpSize];
  now.known = state.known.empty() ? nullptr : &state.known[size_t(now.warp) * state.num_threads];
  now.stack = reinterpret_cast<uintptr_t>(stack);
  now.stack_bytes = stack_bytes;
  now.log_start = state.logs[thread].entries.data();
  now.log_limit = now.log_start + kLogEntries;
  resume_log();
}

void pass_barrier(Site site) {
  if (!state.active) return;
  ++state.barriers[{text_of(site), "block"}];
  merge_all_logs();
  report_reads_of_nothing(true);
  now.interval = ++state.interval;
}

void pass_warp_op(int first, unsigned lanes, unsigned returned, bool orders_memory, Site site) {
  if (!state.active) return;
  merge_logs(first, lanes | returned, 0);
  if (!orders_memory) return;
  ++state.barriers[{text_of(site), "warp"}];
  uint32_t joined[kWarpSize] = {};
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const uint32_t* clocks = &state.clocks[size_t(first + __builtin_ctz(rest)) * kWarpSize];
    for (int i = 0; i < kWarpSize; ++i) joined[i] = std::max(joined[i], clocks[i]);
  }
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    uint32_t* clocks = &state.clocks[size_t(first + lane) * kWarpSize];
    std::copy(joined, joined + kWarpSize, clocks);
    ++clocks[lane];
  }
}

void arrive_at_barrier(int id, int warp) {
  if (!state.active || state.known.empty()) return;
  uint32_t* arrived = state.arrived[id].data();
  const uint32_t* known = &state.known[size_t(warp) * state.num_threads];
  for (int i = 0; i < state.num_threads; ++i) arrived[i] = std::max(arrived[i], known[i]);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const size_t thread = size_t(warp) * kWarpSize + lane;
    uint32_t& clock = state.clocks[thread * kWarpSize + lane];
    arrived[thread] = std::max(arrived[thread], clock++);
  }
}

void pass_named_barrier(int id, uint32_t warps, uint32_t waiting, Site site) {
  if (!state.active) return;
  const bool is_whole =
      waiting == warps && __builtin_popcount(warps) * kWarpSize == state.num_threads;
  if (is_whole) {
    pass_barrier(site);
  } else {
    ++state.barriers[{text_of(site), "warps"}];
  }
  if (state.known.empty()) return;
  std::vector<uint32_t>& arrived = state.arrived[id];
  for (uint32_t rest = waiting; rest != 0; rest &= rest - 1) {
    const int warp = __builtin_ctz(rest);
    uint32_t* known = &state.known[size_t(warp) * state.num_threads];
    for (int i = 0; i < state.num_threads; ++i) known[i] = std::max(known[i], arrived[i]);
    for (int lane = 0; lane < kWarpSize; ++lane) {
      uint32_t* clocks = &state.clocks[(size_t(warp) * kWarpSize + lane) * kWarpSize];
      for (int i = 0; i < kWarpSize; ++i) {
        clocks[i] = std::max(clocks[i], arrived[warp * kWarpSize + i]);
      }
    }
  }
  std::fill(arrived.begin(), arrived.end(), 0);
}

void read_absent_lane(int source, uint3 thread, Site site) {
  if (!state.active) return;
  Observation finding;
  finding.tool = "synccheck";
  finding.what = "absent lane";
  finding.site = text_of(site);
  finding.block = blockIdx;
  finding.thread = thread;
  finding.text = "receives the value of lane " + std::to_string(source) +
                 ", which the mask does not name or which has returned";
  add_finding(std::move(finding));
}

void end_after_access() {
  is_late = true;
}

unsigned make_log_space(int first, unsigned full) {
  merge_logs(first, ~0u, full);
  unsigned drained = 0;
  for (unsigned lanes = full; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    const Log& log = state.logs[first + lane];
    if (log.end == log.entries.data()) drained |= 1u << lane;
  }
  return drained;
}

void report(const char* kind, const std::string& text, Site site, const void* instruction) {
  if (!state.active) return;
  Observation finding;
  finding.tool = kind;
  finding.what = "block ended";
  finding.site = text_of(site);
  // Like the return addresses of the hooks: behind the instruction.
  const uintptr_t distance = reinterpret_cast<uintptr_t>(instruction) - now.code;
  if (distance < kMaxLibraryBytes) finding.pc = uint32_t(distance + 1);
  finding.block = blockIdx;
  finding.thread = threadIdx;
  finding.text = text;
  // A record is a line, its fields are between tabs.
  std::replace(finding.text.begin(), finding.text.end(), '\n', ' ');
  std::replace(finding.text.begin(), finding.text.end(), '\t', ' ');
  add_finding(std::move(finding));
}

void access_atomic(const void* address, size_t bytes, const void* return_address) {
  access(reinterpret_cast<uintptr_t>(address), bytes, kAtomic, return_address);
}

void access_row(const void* address, bool is_write, const void* return_address) {
  access(reinterpret_cast<uintptr_t>(address), 16, is_write ? kWrite : kRead, return_address);
}

void start_copy(const void* shared, const void* global, const void* return_address) {
  if (!state.active) return;
  const auto target = reinterpret_cast<uintptr_t>(shared);
  if (global != nullptr) {
    access(reinterpret_cast<uintptr_t>(global), 16, kRead, return_address);
  }
  const Copy copy{now.interval, pc_of(return_address), step_of_now(), now.thread, kAsyncCopy};
  access(target, 16, kWrite, return_address, kAsyncCopy);
  int region;
  uintptr_t offset;
  SharedMemory* memory = find_shared(target, 16, region, offset);
  if (memory == nullptr || !is_multiple(target, 16)) return;
  if (memory->copies.empty()) memory->copies.resize((memory->bytes + 15) / 16);
  uint32_t& number = memory->copies[offset / 16];
  if (number == 0) {
    number = uint32_t(state.copies.size());
    state.copies.push_back(copy);
    ++now.num_copies;
  }
  state.copies[number] = copy;
}

// From here on the data counts as written by the thread that waited. What others have done there meanwhile
// was found when they did it.
void land_copy(const void* shared) {
  if (!state.active) return;
  int region;
  uintptr_t offset;
  SharedMemory* memory = find_shared(reinterpret_cast<uintptr_t>(shared), 16, region, offset);
  if (memory == nullptr || memory->copies.empty()) return;
  uint32_t& number = memory->copies[offset / 16];
  if (number == 0) return;
  const Copy copy = state.copies[number];
  if (copy.thread != now.thread) return;  // another thread's, into the same place
  number = 0;
  if (--now.num_copies == 0) {
    state.copies.resize(1);
  }
  for (uintptr_t unit = offset >> memory->log2_unit; unit << memory->log2_unit < offset + 16;
       ++unit) {
    Cell& cell = memory->cells[unit].cell;
    // The copy came first, wherever in this interval the wait is.
    cell.write_step = copy.interval == now.interval ? copy.step : 0;
    cell.write_interval = now.interval;
    cell.write_pc = copy.pc;
    cell.write_clock = now.clocks[now.lane];
    cell.write_thread = now.thread;
    cell.copy = kAsyncCopy;
    cell.needs_fence = true;
  }
}

// ---------------------------------------------------------------- mbarriers, TMA and wgmma

namespace {

MBarrierClocks& mbarrier(int number) {
  if (state.mbarriers.size() <= size_t(number)) state.mbarriers.resize(size_t(number) + 1);
  MBarrierClocks& clocks = state.mbarriers[size_t(number)];
  clocks.arrived.resize(size_t(state.num_threads));
  clocks.released.resize(size_t(state.num_threads));
  return clocks;
}

// What the running thread does from here on is not ordered by what it has told so far.
void advance_clock() {
  ++now.clocks[now.lane];
}

// Calls piece(address, bytes) for powers of two, the largest first.
template <typename Piece>
void in_pieces(uintptr_t address, size_t bytes, Piece piece) {
  for (size_t size = 128; bytes > 0; size /= 2) {
    while (bytes >= size) {
      piece(address, size);
      address += size;
      bytes -= size;
    }
  }
}

bool is_kernel_running() {
  return state.active && now.stack_bytes > 0;
}

void make_space_in_log() {
  if (__builtin_expect(is_late, false)) abandon_late_block();
  if (__builtin_expect(now.log >= now.log_limit, false)) wait_for_log_space();
}

}  // namespace

void read_by_copy(const void* global, size_t bytes, const void* return_address) {
  if (!is_kernel_running()) return;
  const uint32_t pc = pc_of(return_address);
  in_pieces(reinterpret_cast<uintptr_t>(global), bytes, [&](uintptr_t address, size_t size) {
    const uintptr_t offset = address - now.arena;
    if (offset >= now.arena_bytes) found_beyond(kRead, pc, kOutside, offset, size);
    touch_global(offset, size, kRead, pc, true);
    append_to_log(pc, kRead, unsigned(size), uint32_t(offset));
    make_space_in_log();
  });
}

void start_bulk_copy(const void* shared, size_t bytes, const void* return_address) {
  if (!is_kernel_running()) return;
  const uint32_t pc = pc_of(return_address);
  const auto target = reinterpret_cast<uintptr_t>(shared);
  int region;
  uintptr_t offset;
  SharedMemory* memory = find_shared(target, bytes, region, offset);
  if (memory == nullptr) found_beyond(kWrite, pc, kDynamicShared, target - now.shared, bytes);
  const Copy copy{now.interval, pc, step_of_now(), now.thread, kBulkCopy};
  in_pieces(target, bytes, [&](uintptr_t address, size_t size) {
    touch_shared(*memory, region, offset + (address - target), size, kWrite, pc, true, kBulkCopy);
    append_to_log(pc, kWrite, unsigned(size), 1u << 31 | uint32_t(address - now.shared));
    make_space_in_log();
  });
  if (memory->copies.empty()) memory->copies.resize((memory->bytes + 15) / 16);
  for (uintptr_t i = offset / 16; i * 16 < offset + bytes; ++i) {
    uint32_t& number = memory->copies[i];
    if (number == 0) {
      number = uint32_t(state.copies.size());
      state.copies.push_back(copy);
      ++now.num_copies;
    }
    state.copies[number] = copy;
  }
}

// From here on the data counts as written by the thread that started the copy, and those that wait for the barrier
// know of it.
void land_bulk_copy(const void* shared, size_t bytes, int barrier) {
  if (!is_kernel_running()) return;
  int region;
  uintptr_t offset;
  SharedMemory* memory = find_shared(reinterpret_cast<uintptr_t>(shared), bytes, region, offset);
  if (memory == nullptr || memory->copies.empty()) return;
  std::vector<uint32_t>& arrived = mbarrier(barrier).arrived;
  for (uintptr_t i = offset / 16; i * 16 < offset + bytes; ++i) {
    uint32_t& number = memory->copies[i];
    if (number == 0) continue;
    const uint16_t thread = state.copies[number].thread;
    number = 0;
    if (--now.num_copies == 0) state.copies.resize(1);
    for (uintptr_t unit = i * 16 >> memory->log2_unit; unit << memory->log2_unit < i * 16 + 16;
         ++unit) {
      Cell& cell = memory->cells[unit].cell;
      if (cell.write_thread != thread || cell.copy != kBulkCopy)
        continue;  // others wrote there meanwhile
      cell.write_interval = now.interval;
      arrived[thread] = std::max(arrived[thread], cell.write_clock);
    }
  }
}

void arrive_at_mbarrier(int barrier) {
  if (!is_kernel_running() || state.known.empty()) return;
  std::vector<uint32_t>& arrived = mbarrier(barrier).arrived;
  for (int i = 0; i < state.num_threads; ++i) arrived[i] = std::max(arrived[i], now.known[i]);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const size_t thread = size_t(now.warp) * kWarpSize + lane;
    if (thread < arrived.size()) arrived[thread] = std::max(arrived[thread], now.clocks[lane]);
  }
  advance_clock();
}

void complete_mbarrier(int barrier) {
  if (!is_kernel_running()) return;
  MBarrierClocks& clocks = mbarrier(barrier);
  clocks.released = clocks.arrived;
}

void pass_mbarrier(int barrier) {
  if (!is_kernel_running() || state.known.empty()) return;
  const std::vector<uint32_t>& released = mbarrier(barrier).released;
  uint32_t* known = &state.known[size_t(now.warp) * state.num_threads];
  for (int i = 0; i < state.num_threads; ++i) known[i] = std::max(known[i], released[i]);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const size_t thread = size_t(now.warp) * kWarpSize + lane;
    if (thread < released.size()) now.clocks[lane] = std::max(now.clocks[lane], released[thread]);
  }
}

void read_by_product(const void* shared, const void* return_address) {
  if (!is_kernel_running()) return;
  const uint32_t pc = pc_of(return_address);
  access(reinterpret_cast<uintptr_t>(shared), 16, kRead, return_address);
  const uintptr_t offset = reinterpret_cast<uintptr_t>(shared) - now.shared;
  if (offset + 16 > state.dynamic_bytes) return;
  AsyncThread& self = state.async_threads[now.thread];
  SharedMemory& memory = state.dynamic_shared;
  for (uintptr_t unit = offset >> memory.log2_unit; unit << memory.log2_unit < offset + 16;
       ++unit) {
    const Cell& cell = memory.cells[unit].cell;
    if (!cell.needs_fence || cell.write_interval < state.first_interval) continue;
    if (state.async_threads[cell.write_thread].fenced_clock >= cell.write_clock) continue;
    found_race({"no proxy fence", cell.write_pc, cell.write_thread, true}, pc, kDynamicShared,
               offset, 16);
    break;
  }
  self.reads.push_back({offset, pc, self.num_committed});
}

void commit_products() {
  if (is_kernel_running()) ++state.async_threads[now.thread].num_committed;
}

// The products that are complete have read until now: what became known to others before did not tell of it.
void wait_for_products(int num_pending) {
  if (!is_kernel_running()) return;
  AsyncThread& self = state.async_threads[now.thread];
  const auto is_complete = [&](const ProductRead& read) {
    if (read.group + uint64_t(num_pending) >= self.num_committed) return false;
    SharedMemory& memory = state.dynamic_shared;
    for (uintptr_t unit = read.offset >> memory.log2_unit;
         unit << memory.log2_unit < read.offset + 16; ++unit) {
      const uintptr_t start = unit << memory.log2_unit;
      const Conflict conflict = record(memory.cells[unit].cell, kRead, read.pc);
      if (conflict.what != nullptr) {
        found_race(conflict, read.pc, kDynamicShared, start, 16);
      } else if (now.num_copies > 0 && !memory.copies.empty() && memory.copies[start / 16] != 0) {
        // The copy began while the product was reading.
        const Copy& copy = state.copies[memory.copies[start / 16]];
        found_race({"write after read", copy.pc, copy.thread, false}, read.pc, kDynamicShared,
                   start, 16);
      }
    }
    return true;
  };
  self.reads.erase(std::remove_if(self.reads.begin(), self.reads.end(), is_complete),
                   self.reads.end());
}

void fence_async_proxy() {
  if (!is_kernel_running()) return;
  state.async_threads[now.thread].fenced_clock = now.clocks[now.lane];
  advance_clock();
}

bool memset_device(const void* target, size_t bytes) {
  if (!state.active || bytes == 0) return true;
  ++state.launch;
  put("launch\t" + number(state.launch) + "\tmemset\t1,1,1\t1,1,1\t0\t");
  const uintptr_t offset = reinterpret_cast<uintptr_t>(target) - now.arena;
  const int index = offset < now.arena_bytes ? state.pages[offset / kPageBytes] : kOutside;
  Region& region = state.regions[index];
  const uintptr_t start = offset - region.offset;
  if (index == kOutside || offset < region.offset || start + bytes > region.bytes) {
    found("memcheck", "memset", 0, index, index == kOutside ? offset : start, bytes);
    return false;
  }
  if (region.is_read_only) {
    found("memcheck", "memset of an input", 0, index, start, bytes);
    return false;
  }
  for (uintptr_t i = start / region.cell_bytes; i * region.cell_bytes < start + bytes; ++i) {
    region.cells[i].is_written = true;
  }
  put("memset\t" + number(state.launch) + "\t" + number(index) + "\t" + number(bytes));
  return true;
}

}  // namespace checker

void copy_vector(void* target, const void* source, size_t bytes) {
  const void* pc = __builtin_return_address(0);
  // A GPU moves the 32 bytes of a double4 in two instructions.
  const size_t piece = std::min<size_t>(bytes, 16);
  for (size_t i = 0; i < bytes; i += piece) {
    checker::access(reinterpret_cast<uintptr_t>(source) + i, piece, checker::kRead, pc);
  }
  std::memcpy(target, source, bytes);
  for (size_t i = 0; i < bytes; i += piece) {
    checker::access(reinterpret_cast<uintptr_t>(target) + i, piece, checker::kWrite, pc);
  }
}

}  // namespace cpu_device

using namespace cpu_device;
using namespace cpu_device::checker;

// ---------------------------------------------------------------- the interface of checker.h

extern "C" {

void cpu_device_check_begin(void* arena, size_t bytes) {
  state = State{};
  now = Now{};
  state.active = true;
  now.arena = reinterpret_cast<uintptr_t>(arena);
  now.arena_bytes = std::min(bytes, kMaxArenaBytes);
  state.pages.assign(now.arena_bytes / kPageBytes + 1, kOutside);
  state.regions.push_back({"", 0, 0, 1, true, 1, {}});
  state.groups.emplace_back();
}

void cpu_device_check_region(const char* name, void* address, size_t bytes, int item_bytes,
                             const unsigned char* valid, int flags) {
  Region region{name,
                reinterpret_cast<uintptr_t>(address) - now.arena,
                bytes,
                size_t(item_bytes),
                (flags & 1) != 0,
                size_t(item_bytes),
                {}};
  region.cells.resize((bytes + item_bytes - 1) / item_bytes);
  for (size_t i = 0; i < region.cells.size(); ++i) {
    region.cells[i].is_valid = valid == nullptr || valid[i] != 0;
    region.cells[i].is_written = (flags & 2) != 0;
  }
  for (uintptr_t page = region.offset / kPageBytes;
       bytes > 0 && page <= (region.offset + bytes - 1) / kPageBytes; ++page) {
    state.pages[page] = uint16_t(state.regions.size());
  }
  state.regions.push_back(std::move(region));
}

const char* cpu_device_check_end() {
  for (size_t i = 1; i < state.regions.size(); ++i) {
    const Region& region = state.regions[i];
    uint64_t missing = 0, first = 0;
    const size_t cells_per_item = region.item_bytes / region.cell_bytes;
    for (size_t j = 0; j < region.cells.size(); ++j) {
      if (region.cells[j].is_written || !region.cells[j].is_valid) continue;
      const size_t item = j / cells_per_item;
      if (missing++ == 0) first = item;
      j = (item + 1) * cells_per_item - 1;  // counted once
    }
    if (missing == 0) continue;
    put("unwritten\t" + number(i) + "\t" + number(first * region.item_bytes) + "\t" +
        number(missing));
  }
  for (const Observation& f : state.findings) {
    put("finding\t" + number(f.launch) + "\t" + f.tool + "\t" + f.what + "\t" + number(f.pc) +
        "\t" + number(f.other_pc) + "\t" + f.site + "\t" + std::to_string(f.region) + "\t" +
        std::to_string(int64_t(f.offset)) + "\t" + number(f.bytes) + "\t" + text_of(f.block) +
        "\t" + text_of(f.thread) + "\t" + text_of(f.other_block) + "\t" + text_of(f.other_thread) +
        "\t" + number(f.count) + "\t" + f.text);
  }
  static std::string output;
  output = std::move(state.output);
  state = State{};
  now = Now{};
  return output.c_str();
}

// ---------------------------------------------------------------- what the compiler calls

#define CPU_DEVICE_RETURN_ADDRESS __builtin_return_address(0)
// What has no alignment of its own size is the copy of a struct: vectors go through copy_vector().
#define CPU_DEVICE_HOOK(name, bytes, kind, announce)                                      \
  void __tsan_##name##bytes(void* p) {                                                    \
    announce(reinterpret_cast<uintptr_t>(p), bytes, kind, CPU_DEVICE_RETURN_ADDRESS);     \
  }                                                                                       \
  void __tsan_unaligned_##name##bytes(void* p) {                                          \
    access_range(reinterpret_cast<uintptr_t>(p), bytes, kind, CPU_DEVICE_RETURN_ADDRESS); \
  }
#define CPU_DEVICE_HOOKS(bytes, announce)                                               \
  CPU_DEVICE_HOOK(read, bytes, kRead, announce)                                         \
  CPU_DEVICE_HOOK(write, bytes, kWrite, announce)                                       \
  void __tsan_read_write##bytes(void* p) {                                              \
    announce(reinterpret_cast<uintptr_t>(p), bytes, kRead, CPU_DEVICE_RETURN_ADDRESS);  \
    announce(reinterpret_cast<uintptr_t>(p), bytes, kWrite, CPU_DEVICE_RETURN_ADDRESS); \
  }
CPU_DEVICE_HOOKS(1, access)
CPU_DEVICE_HOOKS(2, access)
CPU_DEVICE_HOOKS(4, access)
CPU_DEVICE_HOOKS(8, access)
CPU_DEVICE_HOOKS(16, access_range)

void __tsan_read_range(void* p, unsigned long bytes) {
  access_range(reinterpret_cast<uintptr_t>(p), bytes, kRead, CPU_DEVICE_RETURN_ADDRESS);
}
void __tsan_write_range(void* p, unsigned long bytes) {
  access_range(reinterpret_cast<uintptr_t>(p), bytes, kWrite, CPU_DEVICE_RETURN_ADDRESS);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_atomic_thread_fence(int) {}
void __tsan_atomic_signal_fence(int) {}

// A kernel's memcpy, memmove (clang's copy of a struct) and memset: the linker sends these calls here (--wrap),
// and newer versions of clang make others.
#define CPU_DEVICE_COPY(name, function)                                   \
  void* name(void* target, const void* source, size_t bytes) {            \
    const void* pc = CPU_DEVICE_RETURN_ADDRESS;                           \
    access_range(reinterpret_cast<uintptr_t>(source), bytes, kRead, pc);  \
    access_range(reinterpret_cast<uintptr_t>(target), bytes, kWrite, pc); \
    return function(target, source, bytes);                               \
  }
#define CPU_DEVICE_MEMSET(name)                                           \
  void* name(void* target, int value, size_t bytes) {                     \
    const void* pc = CPU_DEVICE_RETURN_ADDRESS;                           \
    access_range(reinterpret_cast<uintptr_t>(target), bytes, kWrite, pc); \
    return std::memset(target, value, bytes);                             \
  }
CPU_DEVICE_COPY(__wrap_memcpy, std::memcpy)
CPU_DEVICE_COPY(__wrap_memmove, std::memmove)
CPU_DEVICE_MEMSET(__wrap_memset)
CPU_DEVICE_COPY(__tsan_memcpy, std::memcpy)
CPU_DEVICE_COPY(__tsan_memmove, std::memmove)
CPU_DEVICE_MEMSET(__tsan_memset)

// std::atomic and the __atomic builtins.
#define CPU_DEVICE_ATOMIC(bits, type)                                                              \
  type __tsan_atomic##bits##_load(const volatile type* p, int) {                                   \
    access_atomic(const_cast<const type*>(p), sizeof(type), CPU_DEVICE_RETURN_ADDRESS);            \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                   \
  }                                                                                                \
  void __tsan_atomic##bits##_store(volatile type* p, type v, int) {                                \
    access_atomic(const_cast<const type*>(p), sizeof(type), CPU_DEVICE_RETURN_ADDRESS);            \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                      \
  }                                                                                                \
  CPU_DEVICE_ATOMIC_UPDATE(bits, type, exchange, __atomic_exchange_n)                              \
  CPU_DEVICE_ATOMIC_UPDATE(bits, type, fetch_add, __atomic_fetch_add)                              \
  CPU_DEVICE_ATOMIC_UPDATE(bits, type, fetch_sub, __atomic_fetch_sub)                              \
  CPU_DEVICE_ATOMIC_UPDATE(bits, type, fetch_and, __atomic_fetch_and)                              \
  CPU_DEVICE_ATOMIC_UPDATE(bits, type, fetch_or, __atomic_fetch_or)                                \
  CPU_DEVICE_ATOMIC_UPDATE(bits, type, fetch_xor, __atomic_fetch_xor)                              \
  bool __tsan_atomic##bits##_compare_exchange_strong(volatile type* p, type* expected, type v,     \
                                                     int, int) {                                   \
    access_atomic(const_cast<const type*>(p), sizeof(type), CPU_DEVICE_RETURN_ADDRESS);            \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }                                                                                                \
  bool __tsan_atomic##bits##_compare_exchange_weak(volatile type* p, type* expected, type v, int,  \
                                                   int) {                                          \
    access_atomic(const_cast<const type*>(p), sizeof(type), CPU_DEVICE_RETURN_ADDRESS);            \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }                                                                                                \
  type __tsan_atomic##bits##_compare_exchange_val(volatile type* p, type expected, type v, int,    \
                                                  int) {                                           \
    access_atomic(const_cast<const type*>(p), sizeof(type), CPU_DEVICE_RETURN_ADDRESS);            \
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);       \
    return expected;                                                                               \
  }
#define CPU_DEVICE_ATOMIC_UPDATE(bits, type, name, builtin)                             \
  type __tsan_atomic##bits##_##name(volatile type* p, type v, int) {                    \
    access_atomic(const_cast<const type*>(p), sizeof(type), CPU_DEVICE_RETURN_ADDRESS); \
    return builtin(p, v, __ATOMIC_SEQ_CST);                                             \
  }
CPU_DEVICE_ATOMIC(8, uint8_t)
CPU_DEVICE_ATOMIC(16, uint16_t)
CPU_DEVICE_ATOMIC(32, uint32_t)
CPU_DEVICE_ATOMIC(64, uint64_t)
}
