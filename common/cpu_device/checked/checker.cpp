// The checker: sees every load, store, atomic and barrier of a kernel, counts what it asks memory for, and
// finds what compute-sanitizer's memcheck, initcheck, racecheck and synccheck find.
//
// A kernel compiled with -fsanitize=thread calls __tsan_read4(address) and its like before each access. Here
// these functions are our own. Each does two things:
//   1. Looks the address up. Every element of device memory and every word of shared memory has a cell that
//      remembers who touched it last; from it follow races, reads of what was never written, and which bytes
//      were touched at all. None of it depends on the order in which the CPU device runs threads and blocks.
//   2. Appends (instruction, address) to the thread's log. At a barrier the logs of a warp's lanes are merged
//      into warp requests: the lanes step together, those at the lowest instruction first, as a GPU's lanes
//      do. A request of 32 lanes then tells 32-byte sectors and bank conflicts.
//
// A check runs on one OS thread, so nothing here is locked.
#include "../checker.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <tuple>
#include <vector>

extern __thread uint3 threadIdx;
extern __thread uint3 blockIdx;
extern thread_local unsigned char fa2_dynamic_smem[];

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
constexpr size_t kLogEntries = 4096;   // of one thread
constexpr size_t kMaxFindings = 1000;  // different ones
constexpr int kOutside = 0;            // no region
constexpr int kDynamicShared = -1;     // static array i is kDynamicShared - 1 - i

// ---------------------------------------------------------------- what is remembered of a location

// Within one block. `interval` counts the stretches between block barriers, over all blocks of the check:
// accesses of different threads in one interval are ordered only by __syncwarp.
struct Cell {
  uint32_t write_interval = 0, write_pc = 0, write_clock = 0;
  uint16_t write_thread = 0;
  bool write_is_atomic = false;
  // Readers of one warp, as a set of lanes, and one reader of another warp.
  uint32_t read_interval = 0, read_pc = 0, read_clock = 0, read_lanes = 0;
  uint16_t read_warp = 0, other_thread = 0;
  uint32_t other_interval = 0, other_pc = 0;
};

struct SharedCell {
  Cell cell;
  uint64_t written_block = 0;  // serial number of the block that wrote it last
};

// Between the blocks of a launch nothing is ordered.
struct GlobalCell {
  Cell cell;
  bool is_valid = true, is_written = false;
  // What the blocks of one launch did. Numbers of blocks count from 1; 0 is none.
  struct {
    uint32_t launch = 0;
    bool is_read = false, is_changed = false;
    uint32_t reader = 0, reader_pc = 0, other_reader = 0, other_reader_pc = 0;
    uint32_t writer = 0, writer_pc = 0;
    uint32_t adder = 0, adder_pc = 0, other_adder = 0;
  } blocks;
};

struct Region {
  std::string name;
  uintptr_t offset;  // of its first byte in the arena
  size_t bytes;
  int item_bytes;
  bool is_read_only;
  std::vector<GlobalCell> cells;
  uint64_t unique_read = 0, unique_written = 0;  // bytes, by this launch
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
  std::string other;  // the other thread or block of a race
  std::string text;
  uint64_t count = 1;
  int launch = 0;
};

using FindingKey = std::tuple<std::string, std::string, uint32_t, uint32_t, int, int, std::string>;

struct Log {
  std::vector<uint64_t> entries;
  uint64_t* end = nullptr;
};

// ---------------------------------------------------------------- the state of the check

// What a hook needs, together.
struct Now {
  bool recording = false;  // a fiber runs, and a check is under way
  uintptr_t shared, arena, arena_bytes, stack, stack_bytes, code;
  uint64_t *log, *log_limit;
  uint32_t interval;
  uint16_t thread, warp, lane;
  uint32_t* clocks;  // of the running thread: how far it knows each lane of its warp to be
  uint64_t block;    // serial number in the check
  uint32_t block_in_launch;
} now;

struct State {
  bool active = false;
  std::string output;  // finished records
  std::vector<Region> regions;
  std::vector<uint16_t> pages;  // region of each page of the arena
  std::vector<SharedCell> dynamic_shared;
  std::vector<std::vector<SharedCell>> static_shared;

  const Library* library = nullptr;
  uintptr_t closure = 0, closure_bytes = 0;
  uintptr_t static_base = 0;
  int launch = 0;
  int num_threads = 0;
  size_t dynamic_bytes = 0;
  uint64_t block_serial = 0;
  uint32_t interval = 0;
  std::vector<Log> logs;
  std::vector<uint32_t> clocks;  // [thread][lane of its warp]
  int logging = -1;              // thread whose log `now` writes

  std::vector<Requests> requests;
  std::map<std::pair<uint32_t, std::pair<int, int>>, size_t> requests_of;
  std::map<std::pair<std::string, bool>, uint64_t> barriers;  // (site, is a warp's) -> times

  std::vector<Observation> findings;
  std::map<FindingKey, size_t> finding_of;
} state;

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

void found(const char* tool, const char* what, uint32_t pc, int region, uint64_t offset, int bytes,
           uint32_t other_pc = 0, const std::string& other = "") {
  Observation finding;
  finding.tool = tool;
  finding.what = what;
  finding.pc = pc;
  finding.other_pc = other_pc;
  finding.region = region;
  finding.offset = offset;
  finding.bytes = bytes;
  finding.block = blockIdx;
  finding.thread = threadIdx;
  finding.other = other;
  add_finding(std::move(finding));
}

// ---------------------------------------------------------------- races

// Whether the running thread is after `clock` of another thread: only lanes that met it in a __syncwarp are.
bool is_after(int thread, uint32_t clock) {
  return thread / kWarpSize == now.warp && now.clocks[thread % kWarpSize] >= clock;
}

struct Conflict {
  const char* what = nullptr;
  uint32_t pc = 0;
  int thread = 0;
};

// Records an access of the running thread; returns the access of another thread of the block that it is not
// ordered with, if there is one and one of the two writes.
Conflict record(Cell& cell, Kind kind, uint32_t pc) {
  Conflict conflict;
  const uint32_t clock = now.clocks[now.lane], interval = now.interval;
  if (cell.write_interval == interval && cell.write_thread != now.thread &&
      !(kind == kAtomic && cell.write_is_atomic) &&
      !is_after(cell.write_thread, cell.write_clock)) {
    conflict = {kind == kRead ? "read after write" : "write after write", cell.write_pc,
                cell.write_thread};
  }
  if (kind != kRead) {
    if (cell.read_interval == interval) {
      int reader = -1;
      if (cell.read_warp != now.warp) {
        reader = cell.read_warp * kWarpSize + __builtin_ctz(cell.read_lanes);
      } else {
        for (unsigned lanes = cell.read_lanes & ~(1u << now.lane); lanes != 0; lanes &= lanes - 1) {
          const int thread = now.warp * kWarpSize + __builtin_ctz(lanes);
          if (!is_after(thread, cell.read_clock)) reader = thread;
        }
      }
      uint32_t reader_pc = cell.read_pc;
      if (reader < 0 && cell.other_interval == interval) {
        reader = cell.other_thread;
        reader_pc = cell.other_pc;
      }
      if (reader >= 0 && conflict.what == nullptr) {
        conflict = {"write after read", reader_pc, reader};
      }
    }
    cell.write_interval = interval;
    cell.write_pc = pc;
    cell.write_clock = clock;
    cell.write_thread = now.thread;
    cell.write_is_atomic = kind == kAtomic;
    return conflict;
  }
  if (cell.read_interval != interval) {
    cell.read_interval = interval;
    cell.read_pc = pc;
    cell.read_clock = clock;
    cell.read_lanes = 1u << now.lane;
    cell.read_warp = now.warp;
  } else if (cell.read_warp == now.warp) {
    bool all_before = clock > cell.read_clock;
    for (unsigned lanes = cell.read_lanes; all_before && lanes != 0; lanes &= lanes - 1) {
      all_before = is_after(now.warp * kWarpSize + __builtin_ctz(lanes), cell.read_clock);
    }
    if (all_before) cell.read_lanes = 0;
    // Of reads with different clocks the smallest is kept: a race may go unseen, none is made up.
    cell.read_clock = all_before ? clock : std::min(cell.read_clock, clock);
    cell.read_lanes |= 1u << now.lane;
    cell.read_pc = pc;
  } else if (cell.other_interval != interval) {
    cell.other_interval = interval;
    cell.other_thread = now.thread;
    cell.other_pc = pc;
  }
  return conflict;
}

// The same between blocks; the conflict's `thread` is the number of the other block in the launch.
Conflict record_between_blocks(GlobalCell& cell, Kind kind, uint32_t pc) {
  auto& blocks = cell.blocks;
  const uint32_t self = now.block_in_launch + 1;
  Conflict conflict;
  const auto conflicts = [&](const char* what, uint32_t block, uint32_t other_pc) {
    if (block != 0 && block != self && conflict.what == nullptr) {
      conflict = {what, other_pc, int(block) - 1};
    }
  };
  const bool reads = kind == kRead;
  conflicts(reads ? "one block reads, another writes" : "two blocks write", blocks.writer,
            blocks.writer_pc);
  if (kind != kAtomic) {
    conflicts(reads ? "one block reads, another adds" : "one block writes, another adds",
              blocks.adder == self ? blocks.other_adder : blocks.adder, blocks.adder_pc);
  }
  if (!reads) {
    conflicts(kind == kWrite ? "one block reads, another writes" : "one block reads, another adds",
              blocks.reader == self ? blocks.other_reader : blocks.reader,
              blocks.reader == self ? blocks.other_reader_pc : blocks.reader_pc);
  }
  if (reads) {
    if (blocks.reader == 0) {
      blocks.reader = self;
      blocks.reader_pc = pc;
    } else if (blocks.reader != self && blocks.other_reader == 0) {
      blocks.other_reader = self;
      blocks.other_reader_pc = pc;
    }
  } else if (kind == kWrite) {
    blocks.writer = self;
    blocks.writer_pc = pc;
  } else if (blocks.adder == 0) {
    blocks.adder = self;
    blocks.adder_pc = pc;
  } else if (blocks.adder != self) {
    blocks.other_adder = self;
  }
  return conflict;
}

std::string thread_name(int thread) {
  return "thread " + std::to_string(thread);
}

// ---------------------------------------------------------------- one access

void append_to_log(uint32_t pc, Kind kind, unsigned bytes, uint32_t location) {
  const unsigned log2_bytes = __builtin_ctz(bytes);
  *now.log++ = uint64_t(pc << 6 | log2_bytes << 2 | kind) << 32 | location;
}

void touch_shared(std::vector<SharedCell>& cells, int region, size_t region_bytes, uintptr_t offset,
                  size_t bytes, Kind kind, uint32_t pc) {
  if (offset + bytes > region_bytes) {
    found("memcheck", kKindNames[kind], pc, region, offset, int(bytes));
    return;
  }
  for (uintptr_t word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) {
    SharedCell& shared = cells[word];
    if (kind != kWrite && shared.written_block != now.block) {
      found("initcheck", kKindNames[kind], pc, region, word * 4, int(bytes));
      shared.written_block = now.block;  // once is enough
    }
    if (kind != kRead) shared.written_block = now.block;
    const Conflict conflict = record(shared.cell, kind, pc);
    if (conflict.what != nullptr) {
      found("racecheck", conflict.what, pc, region, std::max(word * 4, offset), int(bytes),
            conflict.pc, thread_name(conflict.thread));
    }
  }
}

void touch_global(uintptr_t offset, size_t bytes, Kind kind, uint32_t pc) {
  const int index = state.pages[offset / kPageBytes];
  Region& region = state.regions[index];
  const uintptr_t start = offset - region.offset;
  if (index == kOutside || offset < region.offset || start + bytes > region.bytes) {
    found("memcheck", kKindNames[kind], pc, kOutside, offset, int(bytes));
    return;
  }
  if (kind != kRead && region.is_read_only) {
    found("memcheck", "write to an input", pc, index, start, int(bytes));
    return;
  }
  for (uintptr_t i = start / region.item_bytes; i * region.item_bytes < start + bytes; ++i) {
    GlobalCell& cell = region.cells[i];
    if (!cell.is_valid) {
      found("memcheck", kKindNames[kind], pc, index, i * region.item_bytes, int(bytes));
      continue;
    }
    if (kind != kWrite && !cell.is_written) {
      found("initcheck", kKindNames[kind], pc, index, i * region.item_bytes, int(bytes));
      cell.is_written = true;  // once is enough
    }
    if (kind != kRead) cell.is_written = true;
    if (cell.blocks.launch != uint32_t(state.launch)) {
      cell.blocks = {};
      cell.blocks.launch = uint32_t(state.launch);
    }
    bool& is_touched = kind == kRead ? cell.blocks.is_read : cell.blocks.is_changed;
    if (!is_touched) {
      is_touched = true;
      (kind == kRead ? region.unique_read : region.unique_written) += region.item_bytes;
    }
    Conflict conflict = record(cell.cell, kind, pc);
    if (conflict.what != nullptr) {
      found("racecheck", conflict.what, pc, index, i * region.item_bytes, int(bytes), conflict.pc,
            thread_name(conflict.thread));
    }
    conflict = record_between_blocks(cell, kind, pc);
    if (conflict.what != nullptr) {
      found("racecheck", conflict.what, pc, index, i * region.item_bytes, int(bytes), conflict.pc,
            "block " + std::to_string(conflict.thread));
    }
  }
}

// Neither device memory nor dynamic shared memory nor the thread's own stack.
void touch_other(uintptr_t address, size_t bytes, Kind kind, uint32_t pc) {
  const auto& arrays = state.library->shared_arrays;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const uintptr_t offset = address - (state.static_base + arrays[i].offset);
    if (offset >= arrays[i].bytes) continue;
    const int region = kDynamicShared - 1 - int(i);
    touch_shared(state.static_shared[i], region, arrays[i].bytes, offset, bytes, kind, pc);
    const uint32_t location = 3u << 30 | uint32_t(i) << 20 | uint32_t(offset);
    append_to_log(pc, kind, unsigned(bytes), location);
    return;
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
  found("memcheck", kKindNames[kind], pc, kOutside, address - now.arena, int(bytes));
  abandon_checked_block();  // this access would not stay within what the check owns
}

inline void access(uintptr_t address, size_t bytes, Kind kind, const void* return_address) {
  if (!now.recording) return;
  if (address - now.stack < now.stack_bytes) return;
  const uint32_t pc = pc_of(return_address);
  if (address % bytes != 0) {
    const uintptr_t offset = address - now.shared;
    const bool is_shared = offset < kMaxSharedBytes;
    found("memcheck", "misaligned", pc, is_shared ? kDynamicShared : kOutside,
          is_shared ? offset : address - now.arena, int(bytes));
  }
  uintptr_t offset = address - now.shared;
  if (offset < kMaxSharedBytes) {
    touch_shared(state.dynamic_shared, kDynamicShared, state.dynamic_bytes, offset, bytes, kind,
                 pc);
    append_to_log(pc, kind, unsigned(bytes), 1u << 31 | uint32_t(offset));
  } else if ((offset = address - now.arena) < now.arena_bytes) {
    touch_global(offset, bytes, kind, pc);
    append_to_log(pc, kind, unsigned(bytes), uint32_t(offset));
  } else {
    touch_other(address, bytes, kind, pc);
  }
  if (__builtin_expect(now.log >= now.log_limit, false)) wait_for_log_space();
}

// An access of any size, in pieces that one instruction can do.
void access_range(uintptr_t address, size_t bytes, Kind kind, const void* return_address) {
  while (bytes > 0) {
    size_t piece = 16;
    while (piece > bytes || (piece > 1 && address % piece != 0)) piece /= 2;
    access(address, piece, kind, return_address);
    address += piece;
    bytes -= piece;
  }
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

// Passes over the banks: as many as the bank with the most distinct words has. 8-byte accesses go by half
// warps, 16-byte accesses by quarters.
unsigned count_wavefronts(const uint32_t* locations, int n, unsigned bytes) {
  const int group = bytes <= 4 ? kWarpSize : bytes == 8 ? kWarpSize / 2 : kWarpSize / 4;
  unsigned wavefronts = 0;
  for (int start = 0; start < n; start += group) {
    uint32_t words[kNumBanks][kWarpSize];
    unsigned used[kNumBanks] = {};
    unsigned most = 1;
    for (int i = start; i < std::min(n, start + group); ++i) {
      for (uint32_t word = locations[i] / kBankBytes;
           word <= (locations[i] + bytes - 1) / kBankBytes; ++word) {
        const uint32_t bank = word % kNumBanks;
        unsigned j = 0;
        while (j < used[bank] && words[bank][j] != word) ++j;
        if (j < used[bank]) continue;
        words[bank][used[bank]++] = word;
        most = std::max(most, used[bank]);
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
      is_shared ? count_wavefronts(locations, n, bytes) : count_sectors(locations, n, bytes);
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
  for (int i = 1; i < n; ++i) is_one = is_one && region_of(locations[i]) == region;
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

// Merges the logs of the lanes `lanes` of a warp into requests. A log of `growing` lanes goes on later: when
// one of them runs out, merging has to wait for it.
void merge_logs(int first, unsigned lanes, unsigned growing) {
  save_log();
  uint64_t *next[kWarpSize], *end[kWarpSize];
  int of[kWarpSize];
  int n = 0;
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    if (first + lane >= state.num_threads) break;
    Log& log = state.logs[first + lane];
    of[n] = lane;
    next[n] = log.entries.data();
    end[n++] = log.end;
  }
  while (true) {
    uint32_t lowest = ~0u;
    bool is_open = true;
    for (int i = 0; i < n; ++i) {
      if (next[i] < end[i]) {
        lowest = std::min(lowest, uint32_t(*next[i] >> 32));
      } else if (growing >> of[i] & 1u) {
        is_open = false;
      }
    }
    if (!is_open || lowest == ~0u) break;
    uint32_t locations[kWarpSize];
    int who[kWarpSize], count = 0;
    for (int i = 0; i < n; ++i) {
      if (next[i] == end[i] || uint32_t(*next[i] >> 32) != lowest) continue;
      locations[count] = uint32_t(*next[i]++);
      who[count++] = of[i];
    }
    merge_step(lowest, locations, who, count);
  }
  for (int i = 0; i < n; ++i) {
    Log& log = state.logs[first + of[i]];
    std::copy(next[i], end[i], log.entries.data());
    log.end = log.entries.data() + (end[i] - next[i]);
  }
  if (state.logging >= 0) now.log = state.logs[state.logging].end;
}

void merge_all_logs() {
  for (int first = 0; first < state.num_threads; first += kWarpSize) merge_logs(first, ~0u, 0);
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

void start_launch(const Library& library, const std::string& kernel,
                  const cudaLaunchConfig_t& config, const void* closure, size_t closure_bytes) {
  if (!state.active) return;
  ++state.launch;
  state.library = &library;
  state.closure = reinterpret_cast<uintptr_t>(closure);
  state.closure_bytes = closure_bytes;
  state.dynamic_bytes = config.dynamicSmemBytes;
  state.num_threads = int(config.blockDim.x * config.blockDim.y * config.blockDim.z);
  state.logs.resize(state.num_threads);
  for (Log& log : state.logs) {
    log.entries.resize(kLogEntries + 64);  // one access of a kernel may append a few entries
    log.end = log.entries.data();
  }
  state.dynamic_shared.resize(kMaxSharedBytes / 4);
  state.static_base = 0;
  if (!library.shared_arrays.empty()) {
    state.static_base = reinterpret_cast<uintptr_t>(thread_local_block(library));
  }
  state.static_shared.clear();
  for (const SharedArray& array : library.shared_arrays) {
    state.static_shared.emplace_back(array.bytes / 4 + 1);
  }
  now.shared = reinterpret_cast<uintptr_t>(fa2_dynamic_smem);
  now.code = library.base;
  put("launch\t" + number(state.launch) + "\t" + kernel + "\t" + text_of(uint3(config.gridDim)) +
      "\t" + text_of(uint3(config.blockDim)) + "\t" + number(config.dynamicSmemBytes) + "\t" +
      library.path);
  for (size_t i = 0; i < library.shared_arrays.size(); ++i) {
    put("array\t" + number(state.launch) + "\t" + number(i) + "\t" + library.shared_arrays[i].name +
        "\t" + number(library.shared_arrays[i].bytes));
  }
}

void end_launch() {
  if (!state.active) return;
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
    put("barrier\t" + launch + "\t" + key.first + "\t" + (key.second ? "warp" : "block") + "\t" +
        number(times));
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
  now.interval = ++state.interval;
  state.clocks.assign(size_t(state.num_threads) * kWarpSize, 0);
  for (int thread = 0; thread < state.num_threads; ++thread) {
    state.clocks[thread * kWarpSize + thread % kWarpSize] = 1;
  }
  state.logging = -1;
  for (Log& log : state.logs) log.end = log.entries.data();
}

void end_block() {
  if (!state.active) return;
  merge_all_logs();
  now.recording = false;
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
  now.stack = reinterpret_cast<uintptr_t>(stack);
  now.stack_bytes = stack_bytes;
  now.log = state.logs[thread].end;
  now.log_limit = state.logs[thread].entries.data() + kLogEntries;
  now.recording = true;
}

void pass_barrier(Site site) {
  if (!state.active) return;
  ++state.barriers[{text_of(site), false}];
  merge_all_logs();
  now.interval = ++state.interval;
}

void pass_warp_op(int first, unsigned lanes, bool orders_memory, Site site) {
  if (!state.active) return;
  merge_logs(first, lanes, 0);
  if (!orders_memory) return;
  ++state.barriers[{text_of(site), true}];
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

void read_absent_lane(int source, Site site) {
  if (!state.active) return;
  Observation finding;
  finding.tool = "synccheck";
  finding.what = "absent lane";
  finding.site = text_of(site);
  finding.block = blockIdx;
  finding.thread = threadIdx;
  finding.text = "receives the value of lane " + std::to_string(source) +
                 ", which the mask does not name or which has returned";
  add_finding(std::move(finding));
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

void report(const char* kind, const std::string& text, Site site) {
  if (!state.active) return;
  Observation finding;
  finding.tool = kind;
  finding.what = "block ended";
  finding.site = text_of(site);
  finding.block = blockIdx;
  finding.thread = threadIdx;
  finding.text = text;
  add_finding(std::move(finding));
}

void access_atomic(const void* address, size_t bytes, const void* return_address) {
  access(reinterpret_cast<uintptr_t>(address), bytes, kAtomic, return_address);
}

void memset_device(const void* target, size_t bytes) {
  if (!state.active || bytes == 0) return;
  ++state.launch;
  put("launch\t" + number(state.launch) + "\tmemset\t1,1,1\t1,1,1\t0\t");
  const uintptr_t offset = reinterpret_cast<uintptr_t>(target) - now.arena;
  const int index = offset < now.arena_bytes ? state.pages[offset / kPageBytes] : kOutside;
  Region& region = state.regions[index];
  const uintptr_t start = offset - region.offset;
  if (index == kOutside || offset < region.offset || start + bytes > region.bytes) {
    found("memcheck", "memset", 0, index, index == kOutside ? offset : start, int(bytes));
    return;
  }
  for (uintptr_t i = start / region.item_bytes; i * region.item_bytes < start + bytes; ++i) {
    region.cells[i].is_written = true;
  }
  put("memset\t" + number(state.launch) + "\t" + number(index) + "\t" + number(bytes));
}

}  // namespace checker

void copy_vector(void* target, const void* source, size_t bytes) {
  const void* pc = __builtin_return_address(0);
  checker::access(reinterpret_cast<uintptr_t>(source), bytes, checker::kRead, pc);
  std::memcpy(target, source, bytes);
  checker::access(reinterpret_cast<uintptr_t>(target), bytes, checker::kWrite, pc);
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
  state.regions.push_back({"", 0, 0, 1, true, {}});
}

void cpu_device_check_region(const char* name, void* address, size_t bytes, int item_bytes,
                             const unsigned char* valid, int flags) {
  Region region{
      name, reinterpret_cast<uintptr_t>(address) - now.arena, bytes, item_bytes, (flags & 1) != 0,
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
    for (size_t j = 0; j < region.cells.size(); ++j) {
      if (region.cells[j].is_written || !region.cells[j].is_valid) continue;
      if (missing++ == 0) first = j;
    }
    if (missing == 0) continue;
    put("unwritten\t" + number(i) + "\t" + number(first * region.item_bytes) + "\t" +
        number(missing));
  }
  for (const Observation& f : state.findings) {
    put("finding\t" + number(f.launch) + "\t" + f.tool + "\t" + f.what + "\t" + number(f.pc) +
        "\t" + number(f.other_pc) + "\t" + f.site + "\t" + std::to_string(f.region) + "\t" +
        std::to_string(int64_t(f.offset)) + "\t" + number(f.bytes) + "\t" + text_of(f.block) +
        "\t" + text_of(f.thread) + "\t" + f.other + "\t" + number(f.count) + "\t" + f.text);
  }
  static std::string output;
  output = std::move(state.output);
  state = State{};
  now = Now{};
  return output.c_str();
}

// ---------------------------------------------------------------- what the compiler calls

#define CPU_DEVICE_RETURN_ADDRESS __builtin_return_address(0)
#define CPU_DEVICE_HOOKS(bytes)                                                       \
  void __tsan_read##bytes(void* p) {                                                  \
    access(reinterpret_cast<uintptr_t>(p), bytes, kRead, CPU_DEVICE_RETURN_ADDRESS);  \
  }                                                                                   \
  void __tsan_write##bytes(void* p) {                                                 \
    access(reinterpret_cast<uintptr_t>(p), bytes, kWrite, CPU_DEVICE_RETURN_ADDRESS); \
  }                                                                                   \
  void __tsan_unaligned_read##bytes(void* p) {                                        \
    access(reinterpret_cast<uintptr_t>(p), bytes, kRead, CPU_DEVICE_RETURN_ADDRESS);  \
  }                                                                                   \
  void __tsan_unaligned_write##bytes(void* p) {                                       \
    access(reinterpret_cast<uintptr_t>(p), bytes, kWrite, CPU_DEVICE_RETURN_ADDRESS); \
  }                                                                                   \
  void __tsan_read_write##bytes(void* p) {                                            \
    access(reinterpret_cast<uintptr_t>(p), bytes, kRead, CPU_DEVICE_RETURN_ADDRESS);  \
    access(reinterpret_cast<uintptr_t>(p), bytes, kWrite, CPU_DEVICE_RETURN_ADDRESS); \
  }
CPU_DEVICE_HOOKS(1)
CPU_DEVICE_HOOKS(2)
CPU_DEVICE_HOOKS(4)
CPU_DEVICE_HOOKS(8)
CPU_DEVICE_HOOKS(16)

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

// A kernel's memcpy and memset; the linker sends its calls here (--wrap).
void* __wrap_memcpy(void* target, const void* source, size_t bytes) {
  const void* pc = CPU_DEVICE_RETURN_ADDRESS;
  access_range(reinterpret_cast<uintptr_t>(source), bytes, kRead, pc);
  access_range(reinterpret_cast<uintptr_t>(target), bytes, kWrite, pc);
  return std::memcpy(target, source, bytes);
}
void* __wrap_memset(void* target, int value, size_t bytes) {
  access_range(reinterpret_cast<uintptr_t>(target), bytes, kWrite, CPU_DEVICE_RETURN_ADDRESS);
  return std::memset(target, value, bytes);
}

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
