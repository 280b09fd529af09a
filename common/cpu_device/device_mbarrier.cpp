// Barriers that count arrivals and bytes, and the copies that report to them.
#include "device_mbarrier.h"

#include <algorithm>
#include <vector>

#include "checker.h"

namespace cpu_device {
namespace {

constexpr int kPoison = 0xff;
constexpr int kRowBytes = 128, kChunkBytes = 16;

// A copy under way: what its destination will hold.
struct BulkCopy {
  unsigned char* target;
  std::vector<unsigned char> data;
};

struct State {
  const MBarrier* barrier;
  int num_arrivals;                    // of a phase
  int phase = 0;                       // the current one
  int num_missing;                     // arrivals, in the current phase
  int64_t announced = 0, started = 0;  // bytes
  int num_waiting = 0;                 // threads
  std::vector<BulkCopy> copies;

  bool is_complete() const { return num_missing == 0 && announced == started; }
};

// Of the block that this OS thread runs. A block has few.
std::vector<State>& states() {
  static thread_local std::vector<State> states;
  return states;
}

State& find(const MBarrier* barrier, const char* function, Site site) {
  for (State& state : states()) {
    if (state.barrier == barrier) return state;
  }
  end_block(std::string(function) + "() at " + name_of(site) + ": the barrier is not initialised",
            "synccheck", site);
}

[[maybe_unused]] int index_of(const State& state) {
  return int(&state - states().data());
}

std::string describe(const void* barrier) {
  for (const State& state : states()) {
    if (state.barrier != barrier) continue;
    return "mbarrier_wait(), phase " + std::to_string(state.phase) + " lacks " +
           std::to_string(state.num_missing) + " of " + std::to_string(state.num_arrivals) +
           " arrivals and " + std::to_string(state.announced - state.started) + " of " +
           std::to_string(state.announced) + " bytes";
  }
  return "mbarrier_wait()";
}

// What the phase's copies bring arrives, and the next phase begins.
void complete(State& state) {
  for (const BulkCopy& copy : state.copies) {
    std::memcpy(copy.target, copy.data.data(), copy.data.size());
    if constexpr (kChecked) {
      checker::land_bulk_copy(copy.target, copy.data.size(), index_of(state));
    }
  }
  state.copies.clear();
  state.announced = state.started = 0;
  state.num_missing = state.num_arrivals;
  ++state.phase;
  state.num_waiting = 0;
  if constexpr (kChecked) checker::complete_mbarrier(index_of(state));
  wake(state.barrier);
}

void complete_if_awaited(State& state) {
  if (state.num_waiting > 0 && state.is_complete()) complete(state);
}

void arrive(MBarrier* barrier, int bytes, const char* function, Site site) {
  State& state = find(barrier, function, site);
  // A phase for which nobody has waited yet ends when the next one begins.
  if (state.is_complete()) complete(state);
  if (state.num_missing == 0) {
    end_block(std::string(function) + "() at " + name_of(site) + ": all " +
                  std::to_string(state.num_arrivals) + " arrivals of phase " +
                  std::to_string(state.phase) + " are there, but only " +
                  std::to_string(state.started) + " of " + std::to_string(state.announced) +
                  " bytes",
              "synccheck", site);
  }
  if constexpr (kChecked) checker::arrive_at_mbarrier(index_of(state));
  --state.num_missing;
  state.announced += bytes;
  complete_if_awaited(state);
}

void start(MBarrier* barrier, void* target, std::vector<unsigned char> data, const char* function,
           Site site) {
  State& state = find(barrier, function, site);
  state.started += int64_t(data.size());
  if (state.started > state.announced) {
    end_block(std::string(function) + "() at " + name_of(site) + ": copies of " +
                  std::to_string(state.started) + " bytes in phase " + std::to_string(state.phase) +
                  " of a barrier that was told to expect " + std::to_string(state.announced),
              "synccheck", site);
  }
  std::memset(target, kPoison, data.size());
  state.copies.push_back({static_cast<unsigned char*>(target), std::move(data)});
  complete_if_awaited(state);
}

}  // namespace

void mbarrier_init(MBarrier* barrier, int num_arrivals, Site site) {
  require_address("mbarrier_init", barrier, 8, true, site);
  for (State& state : states()) {
    if (state.barrier == barrier) {
      end_block("mbarrier_init() at " + name_of(site) + ": the barrier is initialised already",
                "synccheck", site);
    }
  }
  states().push_back({barrier, num_arrivals, 0, num_arrivals, 0, 0, 0, {}});
}

void mbarrier_arrive(MBarrier* barrier, Site site) {
  arrive(barrier, 0, "mbarrier_arrive", site);
}

void mbarrier_expect(MBarrier* barrier, int bytes, Site site) {
  arrive(barrier, bytes, "mbarrier_expect", site);
}

void mbarrier_wait(MBarrier* barrier, int parity, Site site) {
  {
    State& state = find(barrier, "mbarrier_wait", site);
    if (state.phase % 2 == parity && state.is_complete()) complete(state);
    if (state.phase % 2 == parity) ++state.num_waiting;
  }
  while (find(barrier, "mbarrier_wait", site).phase % 2 == parity)
    sleep_on(barrier, describe, site);
  if constexpr (kChecked) {
    checker::pass_mbarrier(index_of(find(barrier, "mbarrier_wait", site)));
  }
}

void tma_load(void* panel, const CUtensorMap& map, MBarrier* barrier, int column, int row, int head,
              int batch, Site site) {
  const void* pc = __builtin_return_address(0);
  const size_t bytes = size_t(map.rows) * kRowBytes;
  require_address("tma_load", panel, kRowBytes, true, site);
  require_address("tma_load", static_cast<char*>(panel) + bytes - kRowBytes, kRowBytes, true, site);
  std::vector<unsigned char> data;
  {
    data.resize(bytes);
  }
  const bool is_inside = head >= 0 && head < map.sizes[2] && batch >= 0 && batch < map.sizes[3];
  const int first = std::max(column, 0);
  const int last = int(std::min<int64_t>(int64_t(column) + map.columns, map.sizes[0]));
  for (int r = 0; r < map.rows; ++r) {
    const int64_t source_row = int64_t(row) + r;
    if (!is_inside || source_row < 0 || source_row >= map.sizes[1] || first >= last) continue;
    const unsigned char* source = map.data + source_row * map.strides[0] + head * map.strides[1] +
                                  batch * map.strides[2] + 2 * int64_t(first);
    if constexpr (kChecked) checker::read_by_copy(source, size_t(2 * (last - first)), pc);
    const uintptr_t target = reinterpret_cast<uintptr_t>(panel) + size_t(r) * kRowBytes;
    for (int c = first; c < last; c += kChunkBytes / 2) {
      const size_t chunk = size_t(c - column) / (kChunkBytes / 2) ^ (target >> 7 & 7);
      std::memcpy(&data[size_t(r) * kRowBytes + chunk * kChunkBytes], source + 2 * (c - first),
                  size_t(2 * std::min(kChunkBytes / 2, last - c)));
    }
  }
  if constexpr (kChecked) checker::start_bulk_copy(panel, bytes, pc);
  start(barrier, panel, std::move(data), "tma_load", site);
}

void bulk_load(void* shared, const void* global, int bytes, MBarrier* barrier, Site site) {
  const void* pc = __builtin_return_address(0);
  if (bytes <= 0 || bytes % kChunkBytes != 0) {
    end_block("bulk_load() at " + name_of(site) + ": " + std::to_string(bytes) +
                  " bytes are not a multiple of 16",
              "memcheck", site);
  }
  require_address("bulk_load", shared, kChunkBytes, true, site);
  require_address("bulk_load", static_cast<char*>(shared) + bytes - kChunkBytes, kChunkBytes, true,
                  site);
  require_address("bulk_load", global, kChunkBytes, false, site);
  if constexpr (kChecked) {
    checker::read_by_copy(global, size_t(bytes), pc);
    checker::start_bulk_copy(shared, size_t(bytes), pc);
  }
  const auto* first = static_cast<const unsigned char*>(global);
  start(barrier, shared, std::vector<unsigned char>(first, first + bytes), "bulk_load", site);
}

void forget_mbarriers() {
  states().clear();
}

}  // namespace cpu_device

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data,
                                const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* tile, const cuuint32_t* steps,
                                CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  const bool is_ours = rank == 4 && tile[2] == 1 && tile[3] == 1 && steps[0] == 1 && steps[1] == 1;
  bool is_valid = is_ours && reinterpret_cast<uintptr_t>(data) % 16 == 0 && tile[0] > 0 &&
                  2 * tile[0] <= 128 && tile[0] % 8 == 0 && tile[1] > 0 && tile[1] <= 256;
  for (int i = 0; i < 4; ++i) is_valid = is_valid && sizes[i] > 0 && sizes[i] <= uint64_t(1) << 32;
  for (int i = 0; i < 3; ++i) {
    is_valid = is_valid && strides[i] % 16 == 0 && strides[i] < uint64_t(1) << 40;
  }
  if (!is_valid) return CUDA_ERROR_INVALID_VALUE;
  map->data = static_cast<unsigned char*>(data);
  std::copy(sizes, sizes + 4, map->sizes);
  std::copy(strides, strides + 3, map->strides);
  map->columns = int32_t(tile[0]);
  map->rows = int32_t(tile[1]);
  return CUDA_SUCCESS;
}
