// The fiber scheduler of the CPU device.
//
// A launch is a queue of blocks. Each OS thread takes a block, runs every CUDA thread of it as a fiber up
// to the next barrier or warp operation, and switches to the next runnable fiber. Nothing waits: when no
// fiber can run and some have not returned, that is a deadlock, and it is reported.
//
// _longjmp into a fiber's own stack is what switching is; the fortified variant forbids it.
#undef _FORTIFY_SOURCE
#include "scheduler.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "checker.h"
#include "device_mbarrier.h"
#include "device_wgmma.h"

// Every kernel's dynamic shared memory; common/cuda/launch.h declares it.
alignas(1024) thread_local unsigned char fa2_dynamic_smem[cpu_device::kMaxSharedBytes];

__thread uint3 threadIdx;
__thread uint3 blockIdx;
__thread uint3 blockDim;
__thread uint3 gridDim;

namespace cpu_device {
namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kGuardBytes = 4096;
constexpr size_t kSignalStackBytes = 64 * 1024;
constexpr int kPoison = 0xff;  // NaN in every floating point type
constexpr size_t kMaxPooledStacks = 4096;

constexpr int kNumNamedBarriers = 16;

enum class State : uint8_t {
  ready,
  at_barrier,
  at_named_barrier,
  at_warp_op,
  at_active_mask,
  asleep,
  log_full,
  done,
};

// A stack keeps its fiber's entry point between blocks: makecontext is slow and runs once per stack.
struct Stack {
  char* base = nullptr;  // the guard page
  bool parked = false;   // `entry` can be resumed
  jmp_buf entry;
};

// The asynchronous copies of a thread, in order. The first `num_landed` have landed.
struct Copies {
  struct Copy {
    void* target;
    unsigned char data[16];
  };
  std::vector<Copy> queue;
  std::vector<size_t> groups;  // those that have not landed: where each ends in `queue`
  size_t num_landed = 0;
};

struct Fiber {
  Stack* stack = nullptr;
  jmp_buf resume;
  bool running = false;  // `resume` is valid for this block
  State state = State::done;
  uint3 index{};
  Site site{};
  // The pending warp operation.
  WarpOp op{};
  unsigned mask = 0;
  uint64_t value = 0;
  int source = 0;
  uint64_t result = 0;
  const Collective* collective = nullptr;
  void* operands = nullptr;
  // The pending block barrier.
  BarrierOp barrier_op{};
  int predicate = 0;
  int barrier_id = 0;  // of the pending named barrier
  // Where the fiber sleeps.
  const void* address = nullptr;
  std::string (*describe)(const void*) = nullptr;
  Copies copies;
};

// One phase of a named barrier: nobody has arrived, or some of the `num_threads` have.
struct NamedBarrier {
  int num_threads = 0;
  uint32_t arrived = 0, waiting = 0;  // warps
  Site site{};                        // of the first to arrive
  Site first_line{};                  // of the lines that call it, the first

  int num_arrived() const { return 32 * __builtin_popcount(arrived); }
};

struct Launch {
  const Library* library;
  std::string kernel_name;
  cudaLaunchConfig_t config;
  void (*invoke)(const void*);
  const void* closure;
  int64_t schedule;
  std::vector<uint64_t> block_order;  // empty: in order
  std::atomic<uint64_t> next_block{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  Finding finding;  // the first one

  uint64_t num_blocks() const {
    return uint64_t(config.gridDim.x) * config.gridDim.y * config.gridDim.z;
  }
  int num_threads() const { return int(config.blockDim.x * config.blockDim.y * config.blockDim.z); }
};

// One OS thread of a launch and the block it runs.
struct Worker {
  Launch* launch;
  std::vector<Fiber> fibers;
  std::vector<int> order;  // in which the fibers are first run
  std::vector<Stack*> stacks;
  int position = 0;  // of the running fiber, in `order`
  int num_done = 0;
  int num_at_barrier = 0;
  int barrier_result = 0;
  NamedBarrier named_barriers[kNumNamedBarriers];
  bool has_named_barriers = false, has_copies = false;  // the block uses some
  jmp_buf home;
  volatile bool in_fiber = false;
  volatile bool is_late = false;  // the block is past its time limit
  double block_start = 0;         // seconds(), for the time limit of a block

  Fiber& current() { return fibers[order[position]]; }
};

__thread Worker* worker;
__thread int64_t thread_schedule = kParallel;
thread_local std::string launch_log;
__thread char* last_text;  // of the last error of this OS thread
__thread cudaError_t last_code;

double initial_block_timeout() {
  constexpr double kUsual = 120;
  const char* text = std::getenv("FA2_CPU_BLOCK_TIMEOUT");
  if (text == nullptr) return kUsual;
  char* end = nullptr;
  const double limit = std::strtod(text, &end);
  if (end != text && *end == '\0' && limit >= 0) return limit;  // NaN is not
  std::fprintf(stderr,
               "FA2_CPU_BLOCK_TIMEOUT is '%s'; expected seconds, or 0 for no limit: %g it is\n",
               text, kUsual);
  return kUsual;
}

double seconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

std::atomic<double> block_timeout_seconds{initial_block_timeout()};

// ---------------------------------------------------------------- messages

std::string name(uint3 v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

std::string name(Site site) {
  if (site.file == nullptr) return "an unknown line";
  const std::string path = site.file;
  const size_t slash = path.rfind('/');
  return (slash == std::string::npos ? path : path.substr(slash + 1)) + ":" +
         std::to_string(site.line);
}

const char* name(WarpOp op) {
  switch (op) {
    case WarpOp::sync: return "__syncwarp";
    case WarpOp::shfl: return "__shfl_sync";
    case WarpOp::shfl_up: return "__shfl_up_sync";
    case WarpOp::shfl_down: return "__shfl_down_sync";
    case WarpOp::shfl_xor: return "__shfl_xor_sync";
    case WarpOp::ballot: return "__ballot_sync";
    case WarpOp::all: return "__all_sync";
    case WarpOp::any: return "__any_sync";
    case WarpOp::match_any: return "__match_any_sync";
    case WarpOp::collective: break;
  }
  return "?";
}

const char* name(BarrierOp op) {
  switch (op) {
    case BarrierOp::sync: return "__syncthreads";
    case BarrierOp::count: return "__syncthreads_count";
    case BarrierOp::all: return "__syncthreads_and";
    case BarrierOp::any: return "__syncthreads_or";
  }
  return "?";
}

std::string hex(unsigned mask) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", mask);
  return text;
}

std::string waiting_for(const Fiber& fiber) {
  switch (fiber.state) {
    case State::at_barrier:
      return std::string(name(fiber.barrier_op)) + "() at " + name(fiber.site);
    case State::at_named_barrier: {
      const NamedBarrier& barrier = worker->named_barriers[fiber.barrier_id];
      return "barrier_sync(" + std::to_string(fiber.barrier_id) + ", " +
             std::to_string(barrier.num_threads) + ") at " + name(fiber.site) + ", at which " +
             std::to_string(barrier.num_arrived()) + " threads have arrived";
    }
    case State::at_warp_op:
      if (fiber.op == WarpOp::collective) {
        return std::string(fiber.collective->name) + "() at " + name(fiber.site);
      }
      return std::string(name(fiber.op)) + "(mask " + hex(fiber.mask) + ") at " + name(fiber.site);
    case State::at_active_mask: return "__activemask() at " + name(fiber.site);
    case State::asleep: return fiber.describe(fiber.address) + ", at " + name(fiber.site);
    case State::ready:
    case State::log_full: return "nothing";
    case State::done: return "nothing: it has returned";
  }
  return "?";
}

cudaError_t remember(cudaError_t code, const std::string& text) {
  std::free(last_text);
  last_text = strdup(text.c_str());
  last_code = code;
  return code;
}

// ---------------------------------------------------------------- ending a block early

// Records the error and leaves the running fiber for good. Its destructors do not run. `tool` is the one of
// compute-sanitizer that finds this kind of error, "error" if none does, null if it is already reported.
[[noreturn]] void abandon_block(cudaError_t code, const std::string& text,
                                const char* tool = "error", Site site = {},
                                const void* instruction = nullptr) {
  Worker& w = *worker;
  w.in_fiber = false;
  if constexpr (kChecked) {
    if (tool != nullptr) checker::report(tool, text, site, instruction);
  }
  {
    const std::lock_guard<std::mutex> lock(w.launch->mutex);
    if (w.launch->finding.code == cudaSuccess) {
      w.launch->finding = {code, "kernel " + w.launch->kernel_name + ", block " + name(blockIdx) +
                                     ", thread " + name(threadIdx) + ": " + text};
    }
  }
  w.launch->stop = true;
  for (Fiber& fiber : w.fibers) {
    if (fiber.running) fiber.stack->parked = false;  // its stack is abandoned half-way
  }
  _longjmp(w.home, 1);
}

// ---------------------------------------------------------------- switching

void finish_fiber(Worker& w);
[[noreturn]] void report_time_limit();

// What a kernel leaves uninitialised in registers or local memory reads as NaN.
[[maybe_unused]] __attribute__((noinline)) void poison_stack() {
  unsigned char below[8 * 1024];
  std::memset(below, kPoison, sizeof below);
  asm volatile("" : : "r"(below) : "memory");  // or it would be left out: nobody here reads it
}

// A stack may serve another OS thread for its next block. Not inlined, so that no address of a
// thread-local variable survives from one block to the next.
__attribute__((noinline)) void run_cuda_thread() {
  Worker& w = *worker;
  std::string error;
  if constexpr (kChecked) poison_stack();
  try {
    w.launch->invoke(w.launch->closure);
  } catch (const std::exception& exception) {
    error = std::string("exception: ") + exception.what();
  } catch (...) {
    error = "exception of unknown type";
  }
  if (!error.empty()) abandon_block(cudaErrorLaunchFailure, error);
  finish_fiber(w);
}

void fiber_main() {
  while (true) run_cuda_thread();
}

[[noreturn]] void enter(Worker& w, int position) {
  w.position = position;
  Fiber& fiber = w.current();
  threadIdx = fiber.index;
  if constexpr (kChecked) {
    checker::enter_thread(w.order[position], fiber.stack->base + kGuardBytes, kStackBytes);
  }
  if (__builtin_expect(w.is_late, false)) report_time_limit();
  if (fiber.running) _longjmp(fiber.resume, 1);
  fiber.running = true;
  Stack& stack = *fiber.stack;
  if (stack.parked) _longjmp(stack.entry, 1);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack.base + kGuardBytes;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, fiber_main, 0);
  setcontext(&context);
  __builtin_unreachable();
}

void release_active_mask_groups(Worker& w) {
  for (Fiber& leader : w.fibers) {
    if (leader.state != State::at_active_mask) continue;
    const int first = int(&leader - w.fibers.data()) & ~31;
    const int last = std::min(first + 32, int(w.fibers.size()));
    const Site site = leader.site;
    unsigned group = 0;
    for (int i = first; i < last; ++i) {
      const Fiber& fiber = w.fibers[i];
      if (fiber.state == State::at_active_mask && fiber.site.line == site.line &&
          fiber.site.file == site.file) {
        group |= 1u << (i - first);
      }
    }
    for (int i = first; i < last; ++i) {
      if ((group >> (i - first) & 1u) == 0) continue;
      w.fibers[i].result = group;
      w.fibers[i].state = State::ready;
    }
  }
}

[[maybe_unused]] void release_full_logs(Worker& w) {
  const int n = int(w.fibers.size());
  for (int first = 0; first < n; first += 32) {
    unsigned full = 0;
    for (int i = first; i < std::min(first + 32, n); ++i) {
      if (w.fibers[i].state == State::log_full) full |= 1u << (i - first);
    }
    if (full == 0) continue;
    const unsigned drained = checker::make_log_space(first, full);
    for (int i = first; i < std::min(first + 32, n); ++i) {
      if (drained >> (i - first) & 1u) w.fibers[i].state = State::ready;
    }
  }
}

[[noreturn]] void report_deadlock(Worker& w) {
  std::map<std::string, std::pair<int, std::string>> groups;  // wait -> (count, first thread)
  for (const Fiber& fiber : w.fibers) {
    auto& [count, first] = groups[waiting_for(fiber)];
    if (count++ == 0) first = name(fiber.index);
  }
  std::string text = "deadlock, no thread of the block can go on:";
  for (const auto& [wait, group] : groups) {
    text += " " + std::to_string(group.first) + " thread" + (group.first > 1 ? "s" : "") +
            " (first " + group.second + ") wait" + (group.first > 1 ? "" : "s") + " for " + wait +
            ";";
  }
  text.pop_back();
  Site site{};
  for (const Fiber& fiber : w.fibers) {
    if (fiber.state != State::done && site.file == nullptr) site = fiber.site;
  }
  abandon_block(cudaErrorLaunchTimeout, text, "synccheck", site);
}

// Leaves the running fiber, which is waiting or done, for the next one that can run.
[[noreturn]] void switch_away(Worker& w) {
  const int n = int(w.fibers.size());
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (int step = 1; step <= n; ++step) {
      const int position = (w.position + step) % n;
      if (w.fibers[w.order[position]].state == State::ready) enter(w, position);
    }
    if (w.num_done == n) {
      w.in_fiber = false;
      _longjmp(w.home, 1);
    }
    if constexpr (kChecked) release_full_logs(w);
    release_active_mask_groups(w);
  }
  report_deadlock(w);
}

void wait(Worker& w) {
  Fiber& self = w.current();
  if (_setjmp(self.resume) == 0) switch_away(w);
}

[[noreturn]] void report_returned_thread(const Fiber& returned, const Fiber& waiting) {
  abandon_block(cudaErrorLaunchFailure,
                "barrier not reached by every thread: thread " + name(waiting.index) +
                    " waits for " + waiting_for(waiting) + ", but thread " + name(returned.index) +
                    " has returned",
                "synccheck", waiting.site);
}

bool try_complete_collective(Worker& w, const Fiber& fiber) {
  const Collective& collective = *fiber.collective;
  const int num_lanes = collective.num_lanes;
  const int first = int(&fiber - w.fibers.data()) / num_lanes * num_lanes;
  const auto needs = [&] {
    return waiting_for(fiber) + " needs " + std::to_string(num_lanes) + " lanes, but ";
  };
  if (first + num_lanes > int(w.fibers.size())) {
    abandon_block(cudaErrorLaunchFailure,
                  needs() + "the last " + (num_lanes == 32 ? "warp" : "warpgroup") +
                      " of the block has " + std::to_string(w.fibers.size() - first),
                  "synccheck", fiber.site);
  }
  const Site site = fiber.site;
  void* operands[kWarpgroupLanes];
  for (int lane = num_lanes - 1; lane >= 0; --lane) {
    const Fiber& other = w.fibers[first + lane];
    if (other.state == State::done) {
      abandon_block(cudaErrorLaunchFailure,
                    needs() + "thread " + name(other.index) + " has returned", "synccheck", site);
    }
    if (other.state != State::at_warp_op || other.op != WarpOp::collective ||
        other.collective != &collective || other.site.line != site.line ||
        other.site.file != site.file) {
      return false;
    }
    operands[lane] = other.operands;
  }
  for (int warp = first; warp < first + num_lanes; warp += 32) {
    if constexpr (kChecked) checker::pass_warp_op(warp, ~0u, 0, false, site);
  }
  for (int lane = 0; lane < num_lanes; ++lane) w.fibers[first + lane].state = State::ready;
  collective.run(operands);
  return true;
}

[[noreturn]] void report_mixed_barriers(const Fiber& waiting, Site site) {
  abandon_block(cudaErrorLaunchFailure,
                "barrier 0 is the one of __syncthreads(): thread " + name(waiting.index) +
                    " waits for " + waiting_for(waiting) + ", while barrier 0 is under way at " +
                    name(site),
                "synccheck", waiting.site);
}

// Completes the warp operation that `fiber` waits for if every lane it needs has arrived.
bool try_complete_warp_op(Worker& w, const Fiber& fiber) {
  if (fiber.op == WarpOp::collective) return try_complete_collective(w, fiber);
  const int first = int(&fiber - w.fibers.data()) & ~31;
  const int last = std::min(first + 32, int(w.fibers.size()));
  const WarpOp op = fiber.op;
  const unsigned mask = fiber.mask;
  unsigned lanes = 0, returned = 0;
  for (int i = last - 1; i >= first; --i) {
    const Fiber& other = w.fibers[i];
    if ((mask >> (i - first) & 1u) == 0) continue;
    if (other.state == State::done) {
      returned |= 1u << (i - first);
      continue;
    }
    if (other.state != State::at_warp_op || other.op != op || other.mask != mask) return false;
    lanes |= 1u << (i - first);
  }
  if constexpr (kChecked) {
    checker::pass_warp_op(first, lanes, returned, op == WarpOp::sync, fiber.site);
  }
  unsigned ballot = 0;
  for (int i = first; i < last; ++i) {
    if ((lanes >> (i - first) & 1u) && w.fibers[i].value != 0) ballot |= 1u << (i - first);
  }
  for (int i = first; i < last; ++i) {
    if ((lanes >> (i - first) & 1u) == 0) continue;
    Fiber& lane = w.fibers[i];
    switch (op) {
      case WarpOp::sync: lane.result = 0; break;
      case WarpOp::shfl:
      case WarpOp::shfl_up:
      case WarpOp::shfl_down:
      case WarpOp::shfl_xor:
        lane.result =
            lanes >> lane.source & 1u ? w.fibers[first + lane.source].value : ~uint64_t(0);
        if constexpr (kChecked) {
          if ((lanes >> lane.source & 1u) == 0) {
            checker::read_absent_lane(lane.source, lane.index, lane.site);
          }
        }
        break;
      case WarpOp::ballot: lane.result = ballot; break;
      case WarpOp::all: lane.result = ballot == lanes; break;
      case WarpOp::any: lane.result = ballot != 0; break;
      case WarpOp::match_any:
        lane.result = 0;
        for (int j = first; j < last; ++j) {
          if ((lanes >> (j - first) & 1u) && w.fibers[j].value == lane.value) {
            lane.result |= uint64_t(1) << (j - first);
          }
        }
        break;
      case WarpOp::collective: break;
    }
    lane.state = State::ready;
  }
  return true;
}

// Called on the fiber's own stack when its CUDA thread returns; comes back for the next block.
void finish_fiber(Worker& w) {
  Fiber& self = w.current();
  self.state = State::done;
  ++w.num_done;
  if (w.num_at_barrier > 0) {
    for (const Fiber& fiber : w.fibers) {
      if (fiber.state == State::at_barrier) report_returned_thread(self, fiber);
    }
  }
  const int first = w.order[w.position] & ~31;
  if (w.has_named_barriers) {
    for (const NamedBarrier& barrier : w.named_barriers) {
      if (barrier.waiting == 0 || barrier.num_threads < int(w.fibers.size())) continue;
      if (barrier.arrived >> (first / 32) & 1u) continue;
      report_returned_thread(self, w.fibers[32 * __builtin_ctz(barrier.waiting)]);
    }
  }
  const int first_of_four = first / kWarpgroupLanes * kWarpgroupLanes;
  for (int i = first_of_four; i < std::min(first_of_four + kWarpgroupLanes, int(w.fibers.size()));
       ++i) {
    const Fiber& fiber = w.fibers[i];
    if (fiber.state != State::at_warp_op) continue;
    const bool is_of_warpgroup =
        fiber.op == WarpOp::collective && fiber.collective->num_lanes == kWarpgroupLanes;
    if (i / 32 == first / 32 || is_of_warpgroup) try_complete_warp_op(w, fiber);
  }
  self.running = false;
  self.stack->parked = true;
  if (_setjmp(self.stack->entry) == 0) switch_away(w);
}

// ---------------------------------------------------------------- stacks

class StackPool {
 public:
  Stack* take() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        Stack* stack = free_.back();
        free_.pop_back();
        return stack;
      }
    }
    void* base = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    mprotect(base, kGuardBytes, PROT_NONE);
    Stack* stack = new Stack;
    stack->base = static_cast<char*>(base);
    return stack;
  }

  void give_back(const std::vector<Stack*>& stacks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Stack* stack : stacks) {
      if (free_.size() < kMaxPooledStacks) {
        free_.push_back(stack);
      } else {
        munmap(stack->base, kGuardBytes + kStackBytes);
        delete stack;
      }
    }
  }

 private:
  std::mutex mutex_;
  std::vector<Stack*> free_;
};

StackPool& stack_pool() {
  static StackPool* pool =
      new StackPool;  // never destroyed: a launch may outlive static destructors
  return *pool;
}

// ---------------------------------------------------------------- crashes and endless loops

// While a launch runs, a fault inside a fiber or a timer that finds the same block still running ends
// that block with an error instead of ending or hanging the process.
const int kFaults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction previous_actions[std::size(kFaults)];
struct sigaction previous_timer_action;
std::mutex signal_mutex;
int num_signal_users = 0;

int timer_signal() {
  return SIGRTMIN + 7;
}

// Where the program was when a signal came.
const void* instruction_of(void* context) {
  [[maybe_unused]] const auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return reinterpret_cast<const void*>(machine.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return reinterpret_cast<const void*>(machine.pc);
#else
  return nullptr;
#endif
}

void on_fault(int signal, siginfo_t* info, void* context) {
  if (worker != nullptr && worker->in_fiber) {
    char text[160];
    const char* tool = "error";
    const char* guard = worker->current().stack->base;
    const char* address = static_cast<const char*>(info->si_addr);
    if (address >= guard && address < guard + kGuardBytes) {
      std::snprintf(text, sizeof(text), "stack overflow: more than %zu KiB of local variables",
                    kStackBytes / 1024);
    } else if (signal == SIGFPE) {
      std::snprintf(text, sizeof(text), "integer division by zero, or overflow of a division");
    } else if (signal == SIGILL) {
      std::snprintf(text, sizeof(text), "illegal instruction");
    } else if (address == nullptr && info->si_code == SI_KERNEL) {
      tool = "memcheck";
      std::snprintf(text, sizeof(text),
                    "invalid access to memory, far outside of every address in use");
    } else {
      tool = "memcheck";
      std::snprintf(text, sizeof(text), "invalid access to memory at address 0x%zx%s",
                    reinterpret_cast<size_t>(address), address == nullptr ? " (null pointer)" : "");
    }
    abandon_block(cudaErrorIllegalAddress, text, tool, {}, instruction_of(context));
  }
  // Not ours: hand it to whoever was there before.
  for (size_t i = 0; i < std::size(kFaults); ++i) {
    if (kFaults[i] != signal) continue;
    const struct sigaction& previous = previous_actions[i];
    if ((previous.sa_flags & SA_SIGINFO) != 0) {
      previous.sa_sigaction(signal, info, context);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
      previous.sa_handler(signal);
    } else {
      ::signal(signal, SIG_DFL);
      raise(signal);
    }
  }
}

[[noreturn]] void report_time_limit() {
  char text[160];
  std::snprintf(text, sizeof(text),
                "the block has not ended after %g s (endless loop?); the limit is "
                "FA2_CPU_BLOCK_TIMEOUT seconds",
                block_timeout_seconds.load());
  abandon_block(cudaErrorLaunchTimeout, text);
}

// Only the kernel's own code can be left wherever it is: here, in the checker or in the C library something may
// be half done. Those look at is_late when they are done.
void on_timer(int, siginfo_t*, void* context) {
  if (worker == nullptr || !worker->in_fiber) return;
  if (seconds() - worker->block_start < block_timeout_seconds) return;
  if (worker->launch->library->has_instruction(instruction_of(context))) report_time_limit();
  worker->is_late = true;
  if constexpr (kChecked) checker::end_after_access();
}

class SignalGuard {
 public:
  SignalGuard() {
    const std::lock_guard<std::mutex> lock(signal_mutex);
    if (num_signal_users++ > 0) return;
    struct sigaction action{};
    // Not blocked inside their handler, because the handler leaves by longjmp.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    action.sa_sigaction = on_fault;
    for (size_t i = 0; i < std::size(kFaults); ++i) {
      sigaction(kFaults[i], &action, &previous_actions[i]);
    }
    action.sa_sigaction = on_timer;
    action.sa_flags |= SA_RESTART;
    sigaction(timer_signal(), &action, &previous_timer_action);
  }
  ~SignalGuard() {
    const std::lock_guard<std::mutex> lock(signal_mutex);
    if (--num_signal_users > 0) return;
    for (size_t i = 0; i < std::size(kFaults); ++i) {
      sigaction(kFaults[i], &previous_actions[i], nullptr);
    }
    sigaction(timer_signal(), &previous_timer_action, nullptr);
  }
};

// Handlers need a stack of their own: the fiber's may be what overflowed.
class SignalStack {
 public:
  SignalStack() : memory_(kSignalStackBytes) {
    stack_t stack{};
    stack.ss_sp = memory_.data();
    stack.ss_size = memory_.size();
    sigaltstack(&stack, &previous_);
  }
  ~SignalStack() { sigaltstack(&previous_, nullptr); }

 private:
  std::vector<char> memory_;
  stack_t previous_{};
};

class BlockTimer {
 public:
  BlockTimer() {
    const double limit = block_timeout_seconds;
    if (limit <= 0) return;
    const double period = limit / 8;  // so late a block that hangs is found
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = timer_signal();
    event._sigev_un._tid = int(syscall(SYS_gettid));
    if (timer_create(CLOCK_MONOTONIC, &event, &timer_) != 0) return;
    active_ = true;
    itimerspec spec{};
    spec.it_value.tv_sec = time_t(period);
    spec.it_value.tv_nsec = long((period - double(spec.it_value.tv_sec)) * 1e9);
    spec.it_interval = spec.it_value;
    timer_settime(timer_, 0, &spec, nullptr);
  }
  ~BlockTimer() {
    if (active_) timer_delete(timer_);
  }

 private:
  timer_t timer_{};
  bool active_ = false;
};

// ---------------------------------------------------------------- running blocks

// What no thread has written reads as NaN.
void poison_shared_memory(const Launch& launch) {
  std::memset(fa2_dynamic_smem, kPoison, launch.config.dynamicSmemBytes);
  if (launch.library->shared_arrays.empty()) return;
  char* block = thread_local_block(*launch.library);
  for (const SharedArray& array : launch.library->shared_arrays) {
    std::memset(block + array.offset, kPoison, array.bytes);
  }
}

void run_block(Worker& w, uint64_t block) {
  const dim3 grid = w.launch->config.gridDim;
  blockIdx = {unsigned(block % grid.x), unsigned(block / grid.x % grid.y),
              unsigned(block / grid.x / grid.y)};
  poison_shared_memory(*w.launch);
  if (w.launch->schedule >= 0) {
    std::mt19937_64 random(uint64_t(w.launch->schedule) * 0x9e3779b97f4a7c15u + block);
    std::shuffle(w.order.begin(), w.order.end(), random);
  }
  for (Fiber& fiber : w.fibers) {
    fiber.running = false;
    fiber.state = State::ready;
  }
  w.num_done = w.num_at_barrier = 0;
  if (w.has_named_barriers) {
    for (NamedBarrier& barrier : w.named_barriers) barrier = {};
  }
  if (w.has_copies) {
    for (Fiber& fiber : w.fibers) {
      fiber.copies.queue.clear();
      fiber.copies.groups.clear();
      fiber.copies.num_landed = 0;
    }
  }
  w.has_named_barriers = w.has_copies = false;
  forget_mbarriers();
  forget_products();
  w.is_late = false;
  w.block_start = seconds();
  if constexpr (kChecked) checker::start_block(block);
  if (_setjmp(w.home) == 0) {
    w.in_fiber = true;
    enter(w, 0);
  }
  if constexpr (kChecked) checker::end_block();
}

void run_worker(Launch* launch) {
  Worker w;
  w.launch = launch;
  const int n = launch->num_threads();
  w.fibers.resize(n);
  w.order.resize(n);
  std::iota(w.order.begin(), w.order.end(), 0);
  const dim3 block = launch->config.blockDim;
  for (int i = 0; i < n; ++i) {
    Fiber& fiber = w.fibers[i];
    fiber.index = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
    fiber.stack = stack_pool().take();
    if (fiber.stack == nullptr) {
      const std::lock_guard<std::mutex> lock(launch->mutex);
      launch->finding = {cudaErrorMemoryAllocation, "no memory for the stacks of the threads"};
      launch->stop = true;
      break;
    }
    w.stacks.push_back(fiber.stack);
  }
  const SignalStack signal_stack;
  const BlockTimer timer;
  Worker* const outer = worker;
  worker = &w;
  blockDim = block;
  gridDim = launch->config.gridDim;
  const uint64_t num_blocks = launch->num_blocks();
  while (!launch->stop) {
    const uint64_t i = launch->next_block++;
    if (i >= num_blocks) break;
    run_block(w, launch->block_order.empty() ? i : launch->block_order[i]);
  }
  worker = outer;
  stack_pool().give_back(w.stacks);
}

unsigned num_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return unsigned(CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

std::mutex attribute_mutex;
std::map<const void*, size_t>& shared_limits() {
  static auto* limits = new std::map<const void*, size_t>;
  return *limits;
}

// Empty when the configuration is one the device accepts.
std::string configuration_error(const void* kernel, const cudaLaunchConfig_t& config) {
  const dim3 grid = config.gridDim, block = config.blockDim;
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (threads == 0 || threads > kMaxThreadsPerBlock || block.x > kMaxBlockX ||
      block.y > kMaxBlockY || block.z > kMaxBlockZ) {
    return "block " + name(uint3(block)) + ": between 1 and 1024 threads, at most (1024,1024,64)";
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > kMaxGridX || grid.y > kMaxGridY ||
      grid.z > kMaxGridZ) {
    return "grid " + name(uint3(grid)) + ": at least 1 and at most (2147483647,65535,65535)";
  }
  size_t limit = kDefaultSharedBytes;
  {
    const std::lock_guard<std::mutex> lock(attribute_mutex);
    const auto found = shared_limits().find(kernel);
    if (found != shared_limits().end()) limit = std::max(limit, found->second);
  }
  if (config.dynamicSmemBytes > limit) {
    return "needs " + std::to_string(config.dynamicSmemBytes) +
           " bytes of dynamic shared memory, the limit set for this kernel is " +
           std::to_string(limit);
  }
  const size_t static_bytes = library_of(kernel).static_shared_bytes(kernel);
  if (static_bytes + config.dynamicSmemBytes > limit) {
    return "needs " + std::to_string(static_bytes) + " bytes of static and " +
           std::to_string(config.dynamicSmemBytes) + " of dynamic shared memory, the limit is " +
           std::to_string(limit) + " together";
  }
  if (config.numAttrs > 0) return "launch attributes are not supported by the CPU device";
  return "";
}

}  // namespace

int block_barrier(BarrierOp op, int predicate, Site site) {
  Worker& w = *worker;
  Fiber& self = w.current();
  self.state = State::at_barrier;
  self.site = site;
  self.barrier_op = op;
  self.predicate = predicate != 0;
  const int n = int(w.fibers.size());
  ++w.num_at_barrier;
  if (w.named_barriers[0].arrived != 0) report_mixed_barriers(self, w.named_barriers[0].site);
  if (w.num_done > 0) {
    for (const Fiber& fiber : w.fibers) {
      if (fiber.state == State::done) report_returned_thread(fiber, self);
    }
  }
  if (w.num_at_barrier < n) {
    wait(w);
    return w.barrier_result;
  }
  int count = 0;
  for (Fiber& fiber : w.fibers) {
    if (fiber.barrier_op != op || fiber.site.line != site.line || fiber.site.file != site.file) {
      abandon_block(cudaErrorLaunchFailure,
                    "threads wait at different barriers: thread " + name(fiber.index) + " for " +
                        waiting_for(fiber) + ", thread " + name(self.index) + " for " +
                        waiting_for(self),
                    "synccheck", self.site);
    }
    count += fiber.predicate;
  }
  if constexpr (kChecked) checker::pass_barrier(site);
  for (Fiber& fiber : w.fibers) fiber.state = State::ready;
  w.num_at_barrier = 0;
  w.barrier_result = op == BarrierOp::count ? count : op == BarrierOp::all ? count == n : count > 0;
  return w.barrier_result;
}

uint64_t warp_exchange(WarpOp op, unsigned mask, uint64_t value, int source, Site site) {
  Worker& w = *worker;
  Fiber& self = w.current();
  self.site = site;
  self.op = op;
  self.mask = mask;
  self.value = value;
  self.source = source;
  self.state = State::at_warp_op;
  if ((mask >> lane_id() & 1u) == 0) {
    abandon_block(cudaErrorLaunchFailure,
                  waiting_for(self) + " is called by lane " + std::to_string(lane_id()) +
                      ", which its mask does not name",
                  "synccheck", site);
  }
  if (!try_complete_warp_op(w, self)) wait(w);
  return self.result;
}

void warp_collective(const Collective& collective, void* operands, Site site) {
  Worker& w = *worker;
  Fiber& self = w.current();
  self.site = site;
  self.op = WarpOp::collective;
  self.collective = &collective;
  self.operands = operands;
  self.state = State::at_warp_op;
  try_complete_collective(w, self);
  if (self.state != State::ready) wait(w);
}

// ---------------------------------------------------------------- named barriers

namespace {

struct BarrierCall {
  int id, num_threads;
  bool waits;
  Site site;
};

std::string name(const BarrierCall& call) {
  return std::string(call.waits ? "barrier_sync(" : "barrier_arrive(") + std::to_string(call.id) +
         ", " + std::to_string(call.num_threads) + ") at " + name(call.site);
}

[[noreturn]] void refuse(const BarrierCall& call, const std::string& why) {
  abandon_block(cudaErrorLaunchFailure, name(call) + ": " + why, "synccheck", call.site);
}

// By the last lane of the warp.
void arrive_at_barrier(void* const* operands) {
  Worker& w = *worker;
  const BarrierCall call = *static_cast<const BarrierCall*>(operands[0]);
  for (int lane = 1; lane < 32; ++lane) {
    const auto& other = *static_cast<const BarrierCall*>(operands[lane]);
    if (other.id != call.id || other.num_threads != call.num_threads) {
      refuse(call, "another lane of the warp calls " + name(other));
    }
  }
  NamedBarrier& barrier = w.named_barriers[call.id];
  const int warp = w.order[w.position] / 32, first = 32 * warp;
  if (barrier.arrived == 0) {
    barrier.num_threads = call.num_threads;
    barrier.site = barrier.first_line = call.site;
  }
  if (call.site.line < barrier.first_line.line) barrier.first_line = call.site;
  w.has_named_barriers = true;
  if (barrier.num_threads != call.num_threads) {
    refuse(call, "the barrier is under way for " + std::to_string(barrier.num_threads) +
                     " threads, since " + name(barrier.site));
  }
  if (barrier.arrived >> warp & 1u) {
    refuse(call, "the warp has already arrived, and only " + std::to_string(barrier.num_arrived()) +
                     " threads have so far");
  }
  if (call.id == 0 && w.num_at_barrier > 0) {
    for (const Fiber& fiber : w.fibers) {
      if (fiber.state == State::at_barrier) report_mixed_barriers(fiber, call.site);
    }
  }
  barrier.arrived |= 1u << warp;
  for (int lane = 0; call.waits && lane < 32; ++lane) {
    Fiber& fiber = w.fibers[first + lane];
    fiber.state = State::at_named_barrier;
    fiber.barrier_id = call.id;
    barrier.waiting |= 1u << warp;
  }
  // An arrival that nobody waits for may be left over at the end.
  if (call.num_threads == int(w.fibers.size()) && w.num_done > 0 && barrier.waiting != 0) {
    for (const Fiber& fiber : w.fibers) {
      const bool has_arrived = barrier.arrived >> ((&fiber - w.fibers.data()) / 32) & 1u;
      if (fiber.state == State::done && !has_arrived) {
        report_returned_thread(fiber, w.fibers[32 * __builtin_ctz(barrier.waiting)]);
      }
    }
  }
  if constexpr (kChecked) checker::arrive_at_barrier(call.id, warp);
  if (barrier.num_arrived() < barrier.num_threads) return;
  if constexpr (kChecked) {
    checker::pass_named_barrier(call.id, barrier.arrived, barrier.waiting, barrier.first_line);
  }
  for (uint32_t warps = barrier.waiting; warps != 0; warps &= warps - 1) {
    const int waiting = 32 * __builtin_ctz(warps);
    for (int lane = 0; lane < 32; ++lane) w.fibers[waiting + lane].state = State::ready;
  }
  barrier = {};
}

void call_barrier(BarrierCall call, const Collective& collective) {
  const int num_threads = int(worker->fibers.size());
  if (call.id < 0 || call.id >= kNumNamedBarriers) refuse(call, "barriers are 0 to 15");
  if (call.num_threads <= 0 || call.num_threads % 32 != 0 || call.num_threads > num_threads) {
    refuse(call, "the number of threads is a multiple of 32, up to the " +
                     std::to_string(num_threads) + " of the block");
  }
  warp_collective(collective, &call, call.site);
}

constexpr Collective kBarrierSync{"barrier_sync", arrive_at_barrier};
constexpr Collective kBarrierArrive{"barrier_arrive", arrive_at_barrier};

}  // namespace

void barrier_sync(int id, int num_threads, Site site) {
  call_barrier({id, num_threads, true, site}, kBarrierSync);
}

void barrier_arrive(int id, int num_threads, Site site) {
  call_barrier({id, num_threads, false, site}, kBarrierArrive);
}

// ---------------------------------------------------------------- asynchronous copies

void require_address(const char* function, const void* address, size_t bytes, bool is_shared,
                     Site site) {
  const auto value = reinterpret_cast<uintptr_t>(address);
  const char* what = nullptr;
  if ((value & (bytes - 1)) != 0 && !(kChecked && checker::active())) {
    what = "misaligned, the address is no multiple of 16";
  } else if (is_shared &&
             value - reinterpret_cast<uintptr_t>(fa2_dynamic_smem) >= kMaxSharedBytes) {
    const Library& library = *worker->launch->library;
    what = "the address is not one of shared memory";
    for (const SharedArray& array : library.shared_arrays) {
      const uintptr_t block = reinterpret_cast<uintptr_t>(thread_local_block(library));
      if (value - (block + array.offset) < array.bytes) what = nullptr;
    }
  }
  if (what == nullptr) return;
  abandon_block(cudaErrorIllegalAddress,
                std::string(function) + "() at " + name(site) + ": " + what, "memcheck", site);
}

void cp_async_16(void* shared, const void* global, bool inside, Site site) {
  Worker& w = *worker;
  if constexpr (kChecked) {
    checker::start_copy(shared, inside ? global : nullptr, __builtin_return_address(0));
  }
  require_address("cp_async_16", shared, 16, true, site);
  require_address("cp_async_16", global, 16, false, site);
  Copies& copies = w.current().copies;
  w.has_copies = true;
  if (copies.num_landed == copies.queue.size()) {
    copies.queue.clear();
    copies.num_landed = 0;
    for (size_t& end : copies.groups) end = 0;  // of groups without copies
  }
  Copies::Copy copy{shared, {}};
  if (inside) std::memcpy(copy.data, global, sizeof(copy.data));
  std::memset(shared, kPoison, sizeof(copy.data));
  copies.queue.push_back(copy);
}

void cp_async_commit() {
  Worker& w = *worker;
  Copies& copies = w.current().copies;
  w.has_copies = true;
  copies.groups.push_back(copies.queue.size());
}

void cp_async_wait(int num_pending) {
  Copies& copies = worker->current().copies;
  if (copies.groups.size() <= size_t(num_pending)) return;
  const auto last = copies.groups.end() - num_pending;
  for (const size_t end = last[-1]; copies.num_landed < end; ++copies.num_landed) {
    const Copies::Copy& copy = copies.queue[copies.num_landed];
    std::memcpy(copy.target, copy.data, sizeof(copy.data));
    if constexpr (kChecked) checker::land_copy(copy.target);
  }
  copies.groups.erase(copies.groups.begin(), last);
}

// ---------------------------------------------------------------- waiting for what other files implement

void end_block(const std::string& text, const char* tool, Site site) {
  abandon_block(cudaErrorLaunchFailure, text, tool, site);
}

void sleep_on(const void* address, std::string (*describe)(const void* address), Site site) {
  Worker& w = *worker;
  Fiber& self = w.current();
  self.site = site;
  self.address = address;
  self.describe = describe;
  self.state = State::asleep;
  wait(w);
}

void wake(const void* address) {
  for (Fiber& fiber : worker->fibers) {
    if (fiber.state == State::asleep && fiber.address == address) fiber.state = State::ready;
  }
}

std::string name_of(Site site) {
  return name(site);
}

unsigned active_mask(Site site) {
  Worker& w = *worker;
  Fiber& self = w.current();
  self.site = site;
  self.state = State::at_active_mask;
  wait(w);
  return unsigned(self.result);
}

void abandon_checked_block() {
  abandon_block(cudaErrorIllegalAddress, "invalid access to memory", nullptr);
}

void abandon_late_block() {
  report_time_limit();
}

void wait_for_log_space() {
  Worker& w = *worker;
  w.current().state = State::log_full;
  wait(w);
}

int lane_id() {
  return worker->order[worker->position] & 31;
}

void fail_assert(const char* condition, const char* file, int line) {
  abandon_block(cudaErrorAssert,
                "assertion `" + std::string(condition) + "` failed at " + name(Site{file, line}),
                "error", {file, line});
}

void fail_trap(const char* file, int line) {
  abandon_block(cudaErrorLaunchFailure, "__trap() at " + name(Site{file, line}), "error",
                {file, line});
}

cudaError_t set_function_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || size_t(value) > kMaxSharedBytes) {
    return remember(cudaErrorInvalidValue, "invalid argument: " + std::to_string(value) +
                                               " bytes of dynamic shared memory, the device has " +
                                               std::to_string(kMaxSharedBytes));
  }
  const std::lock_guard<std::mutex> lock(attribute_mutex);
  shared_limits()[kernel] = size_t(value);
  return cudaSuccess;
}

cudaError_t launch_grid(const void* kernel, const cudaLaunchConfig_t& config,
                        void (*invoke)(const void*), const void* closure, size_t closure_bytes) {
  Launch launch;
  launch.library = &library_of(kernel);
  launch.kernel_name = launch.library->function_name(kernel);
  launch.config = config;
  launch.invoke = invoke;
  launch.closure = closure;
  launch.schedule = thread_schedule;
  if (const std::string error = configuration_error(kernel, config); !error.empty()) {
    return remember(cudaErrorInvalidConfiguration,
                    "kernel " + launch.kernel_name + ": invalid configuration: " + error);
  }
  launch_log += launch.kernel_name + " grid " + name(uint3(config.gridDim)) + " block " +
                name(uint3(config.blockDim)) + " shared " +
                std::to_string(config.dynamicSmemBytes) + "\n";
  const uint64_t num_blocks = launch.num_blocks();
  if (launch.schedule >= 0) {
    launch.block_order.resize(num_blocks);
    std::iota(launch.block_order.begin(), launch.block_order.end(), uint64_t(0));
    std::mt19937_64 random{uint64_t(launch.schedule)};
    std::shuffle(launch.block_order.begin(), launch.block_order.end(), random);
  }
  const SignalGuard signals;
  unsigned num_workers = unsigned(std::min<uint64_t>(num_cores(), num_blocks));
  if (launch.schedule != kParallel) num_workers = 1;
  if constexpr (kChecked) {
    if (checker::active()) num_workers = 1;
    checker::start_launch(*launch.library, kernel, launch.kernel_name, config, closure,
                          closure_bytes);
  }
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < num_workers; ++i) threads.emplace_back(run_worker, &launch);
  run_worker(&launch);
  for (std::thread& thread : threads) thread.join();
  if constexpr (kChecked) checker::end_launch();
  if (launch.finding.code != cudaSuccess) return remember(launch.finding.code, launch.finding.text);
  return cudaSuccess;
}

}  // namespace cpu_device

// ---------------------------------------------------------------- runtime API

using cpu_device::remember;

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorLaunchTimeout: return "cudaErrorLaunchTimeout";
    case cudaErrorAssert: return "cudaErrorAssert";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaSuccess) return "no error";
  const bool known = cpu_device::last_text != nullptr && cpu_device::last_code == error;
  return known ? cpu_device::last_text : cudaGetErrorName(error);
}

// Errors are returned by the call that made them, and none is sticky.
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
cudaError_t cudaPeekAtLastError() {
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool is_known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = is_known ? reinterpret_cast<void*>(cuTensorMapEncodeTiled) : nullptr;
  *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = int(cpu_device::kMaxThreadsPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(cpu_device::kDefaultSharedBytes); break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = int(cpu_device::num_cores()); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(cpu_device::kMaxSharedBytes); break;
  }
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*pointer != nullptr || bytes == 0) return cudaSuccess;
  return remember(cudaErrorMemoryAllocation, "out of memory: " + std::to_string(bytes) + " bytes");
}
cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  if constexpr (cpu_device::kChecked) {
    if (!cpu_device::checker::memset_device(pointer, bytes)) {
      return remember(cudaErrorInvalidValue, "invalid argument: a memset of " +
                                                 std::to_string(bytes) +
                                                 " bytes that are not one tensor's to write");
    }
  }
  std::memset(pointer, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(pointer, value, bytes);
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  return cudaMemcpy(target, source, bytes, kind);
}

extern "C" {

void cpu_device_set_schedule(int64_t schedule) {
  cpu_device::thread_schedule = schedule;
}

const char* cpu_device_launch_log() {
  return cpu_device::launch_log.c_str();
}

void cpu_device_clear_launch_log() {
  cpu_device::launch_log.clear();
}

void cpu_device_set_block_timeout(double seconds) {
  cpu_device::block_timeout_seconds = seconds;
}
}
