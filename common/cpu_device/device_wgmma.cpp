// What a warpgroup does in one product, for all of its lanes.
#include "device_wgmma.h"

#include <algorithm>
#include <vector>

#include "checker.h"

extern thread_local unsigned char fa2_dynamic_smem[];

namespace cpu_device {
namespace {

constexpr int kLanes = kWarpgroupLanes, kM = 64, kK = 16, kMaxN = 128;
constexpr int kChunkBytes = 16, kRowBytes = 128, kEightRows = 1024;
constexpr int kChunkItems = kChunkBytes / 2;

// D of products that are under way: where each lane keeps its part, and what it will hold.
struct Product {
  float* d[kLanes];
  int num_columns;
  uint64_t group;          // of the last product that adds to it
  std::vector<float> sum;  // [kM, num_columns]
};

struct Warpgroup {
  bool is_fenced = false;
  uint64_t num_committed = 0;  // groups
  std::vector<Product> products;
};

// Of the block that this OS thread runs.
std::vector<Warpgroup>& warpgroups() {
  static thread_local std::vector<Warpgroup> warpgroups(kMaxThreadsPerBlock / kLanes);
  return warpgroups;
}

int thread_in_block() {
  return int(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
}

Warpgroup& warpgroup() {
  return warpgroups()[thread_in_block() / kLanes];
}

struct Call {
  WgmmaCall wgmma;
  Site site;
};

// ---------------------------------------------------------------- matrices in shared memory

// Chunk i of the 16 bytes that a matrix of 16 by 64 numbers, or twice as many, consists of, as an offset in shared
// memory. k-major: two chunks of each row. m-major: eight chunks of each k, then those of the next panel.
uint32_t chunk_offset(SharedMatrix matrix, bool rows_are_k, int i) {
  const uint32_t start = (matrix.word & 0x3fff) * 16,
                 panel_bytes = (matrix.word >> 16 & 0x3fff) * 16;
  const uint32_t panel = rows_are_k ? uint32_t(i) / 128 : 0;
  const uint32_t row = rows_are_k ? uint32_t(i) % 128 / 8 : uint32_t(i) / 2;
  const uint32_t chunk = rows_are_k ? uint32_t(i) % 8 : uint32_t(i) % 2;
  const uint32_t offset = start + panel * panel_bytes + row / 8 * kEightRows + row % 8 * kRowBytes +
                          chunk * kChunkBytes;
  return offset ^ (offset >> 7 & 7) << 4;
}

// values[m][k], with num_m rows; a row has kK numbers.
template <typename Format>
void load(float (*values)[kK], int num_m, SharedMatrix matrix, bool rows_are_k) {
  for (int i = 0; i < 2 * num_m; ++i) {
    uint16_t items[kChunkItems];
    std::memcpy(items, fa2_dynamic_smem + chunk_offset(matrix, rows_are_k, i), sizeof(items));
    for (int e = 0; e < kChunkItems; ++e) {
      const float x = Format::to_float(items[e]);
      if (rows_are_k) {
        values[i / 128 * 64 + i % 8 * kChunkItems + e][i % 128 / 8] = x;
      } else {
        values[i / 2][i % 2 * kChunkItems + e] = x;
      }
    }
  }
}

// ---------------------------------------------------------------- the product

// Calls place(lane, register, row, column) for every element of D.
template <typename Place>
void for_each_element(int num_columns, Place place) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane % 32 / 4, t = lane % 4, first_row = lane / 32 * 16;
    for (int r = 0; r < num_columns / 2; ++r) {
      place(lane, r, first_row + g + r % 4 / 2 * 8, r / 4 * 8 + 2 * t + r % 2);
    }
  }
}

using Four = float __attribute__((vector_size(16)));

void require_same(const Call& first, const Call& other) {
  const auto &a = first.wgmma, &b = other.wgmma;
  if (a.a.word == b.a.word && a.b.word == b.b.word && a.adds == b.adds) return;
  end_block("wgmma() at " + name_of(first.site) +
                ": the lanes of the warpgroup give different matrices in shared memory",
            "synccheck", first.site);
}

// Products are exact in fp32, sums are rounded to it in the order of k.
template <typename Format>
void multiply(void* const* operands) {
  const auto call_of = [&](int lane) -> const Call& {
    return *static_cast<const Call*>(operands[lane]);
  };
  const Call& first = call_of(0);
  const WgmmaCall& wgmma = first.wgmma;
  for (int lane = 1; lane < kLanes; ++lane) require_same(first, call_of(lane));
  Warpgroup& self = warpgroup();
  if (!self.is_fenced) {
    end_block("wgmma() at " + name_of(first.site) +
                  ": no wgmma_fence() since the warpgroup could touch its registers",
              "synccheck", first.site);
  }
  const int n = wgmma.num_columns;
  float a[kM][kK], b_rows[kMaxN][kK], b[kK][kMaxN];
  if (wgmma.registers == nullptr) {
    load<Format>(a, kM, wgmma.a, wgmma.rows_of_a_are_k);
  } else {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int g = lane % 32 / 4, t = lane % 4, first_row = lane / 32 * 16;
      for (int r = 0; r < 4; ++r) {
        const uint32_t pair = call_of(lane).wgmma.registers[r];
        float* target = &a[first_row + g + r % 2 * 8][2 * t + r / 2 * 8];
        target[0] = Format::to_float(uint16_t(pair));
        target[1] = Format::to_float(uint16_t(pair >> 16));
      }
    }
  }
  load<Format>(b_rows, n, wgmma.b, wgmma.rows_of_b_are_k);
  for (int k = 0; k < kK; ++k) {
    for (int j = 0; j < n; ++j) b[k][j] = b_rows[j][k];
  }

  const auto is_same = [&](const Product& product) { return product.d[0] == wgmma.d; };
  auto product = std::find_if(self.products.begin(), self.products.end(), is_same);
  const bool is_new = product == self.products.end();
  if (is_new) {
    self.products.emplace_back();
    product = self.products.end() - 1;
    product->num_columns = n;
    for (int lane = 0; lane < kLanes; ++lane) product->d[lane] = call_of(lane).wgmma.d;
  }
  product->group = self.num_committed;
  product->sum.resize(size_t(kM) * n);
  float* sum = product->sum.data();
  if (!wgmma.adds) {
    std::fill(sum, sum + kM * n, 0.0f);
  } else if (is_new) {
    for_each_element(n, [&](int lane, int r, int row, int column) {
      sum[row * n + column] = product->d[lane][r];
    });
  }
  for (int m = 0; m < kM; ++m) {
    for (int j = 0; j < n; j += 16) {
      Four x[4];
      std::memcpy(x, sum + m * n + j, sizeof(x));
      for (int k = 0; k < kK; ++k) {
        Four y[4];
        std::memcpy(y, &b[k][j], sizeof(y));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) x[i] += a[m][k] * y[i];
      }
      std::memcpy(sum + m * n + j, x, sizeof(x));
    }
  }
  for (float* d : product->d) std::memset(d, 0xff, sizeof(float) * n / 2);
}

// ---------------------------------------------------------------- groups

void fence(void* const*) {
  warpgroup().is_fenced = true;
}

void commit(void* const*) {
  ++warpgroup().num_committed;
}

void wait(void* const* operands) {
  const int num_pending = *static_cast<const int*>(operands[0]);
  Warpgroup& self = warpgroup();
  const auto is_complete = [&](const Product& product) {
    return product.group + uint64_t(num_pending) < self.num_committed;
  };
  for (const Product& product : self.products) {
    if (!is_complete(product)) continue;
    for_each_element(product.num_columns, [&](int lane, int r, int row, int column) {
      product.d[lane][r] = product.sum[size_t(row) * product.num_columns + column];
    });
  }
  self.products.erase(std::remove_if(self.products.begin(), self.products.end(), is_complete),
                      self.products.end());
  self.is_fenced = false;
}

constexpr Collective kMultiplyHalf{"wgmma<__half>", multiply<Half>, kLanes};
constexpr Collective kMultiplyBFloat16{"wgmma<__nv_bfloat16>", multiply<BFloat16>, kLanes};
constexpr Collective kFence{"wgmma_fence", fence, kLanes};
constexpr Collective kCommit{"wgmma_commit", commit, kLanes};
constexpr Collective kWait{"wgmma_wait", wait, kLanes};

// Of a matrix in shared memory, this lane's part of what the product reads: a chunk, or two.
void read_shared(SharedMatrix matrix, bool rows_are_k, int num_m, Site site, const void* pc) {
  for (int i = thread_in_block() % kLanes; i < 2 * num_m; i += kLanes) {
    const unsigned char* chunk = fa2_dynamic_smem + chunk_offset(matrix, rows_are_k, i);
    if constexpr (kChecked) checker::read_by_product(chunk, pc);
    require_address("wgmma", chunk, kChunkBytes, true, site);
  }
}

}  // namespace

SharedMatrix shared_matrix(const void* first, int panel_bytes, Site site) {
  require_address("shared_matrix", first, 16, true, site);
  const auto offset = static_cast<const unsigned char*>(first) - fa2_dynamic_smem;
  return {uint32_t(offset) / 16 | uint32_t(panel_bytes / 16) << 16};
}

template <typename T>
void wgmma(const WgmmaCall& call, Site site) {
  const void* pc = __builtin_return_address(0);
  if (call.registers == nullptr) read_shared(call.a, call.rows_of_a_are_k, kM, site, pc);
  read_shared(call.b, call.rows_of_b_are_k, call.num_columns, site, pc);
  Call self{call, site};
  const bool is_half = std::is_same_v<T, __half>;
  warp_collective(is_half ? kMultiplyHalf : kMultiplyBFloat16, &self, site);
}
template void wgmma<__half>(const WgmmaCall& call, Site site);
template void wgmma<__nv_bfloat16>(const WgmmaCall& call, Site site);

void wgmma_fence(Site site) {
  warp_collective(kFence, nullptr, site);
}

void wgmma_commit(Site site) {
  if constexpr (kChecked) checker::commit_products();
  warp_collective(kCommit, nullptr, site);
}

void wgmma_wait(int num_pending, Site site) {
  warp_collective(kWait, &num_pending, site);
  if constexpr (kChecked) checker::wait_for_products(num_pending);
}

void fence_async_proxy() {
  if constexpr (kChecked) checker::fence_async_proxy();
}

void forget_products() {
  for (Warpgroup& warpgroup : warpgroups()) {
    if (warpgroup.num_committed > 0 || !warpgroup.products.empty()) warpgroup = {};
  }
}

}  // namespace cpu_device
