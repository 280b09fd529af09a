// What a warp does in one tensor core operation, for all of its lanes.
#include "device_tensor_core.h"

#include "checker.h"

namespace cpu_device {
namespace {

// ---------------------------------------------------------------- ldmatrix, stmatrix

// What a lane passes: its registers, and the row that it has an address of.
struct MatrixLane {
  uint32_t* r;
  uint32_t row[4];
};

template <int kCount>
void load_matrices(void* const* operands) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < kCount; ++i) {
      const auto& source = *static_cast<const MatrixLane*>(operands[8 * i + lane / 4]);
      static_cast<const MatrixLane*>(operands[lane])->r[i] = source.row[lane % 4];
    }
  }
}

template <int kCount>
void load_transposed(void* const* operands) {
  const auto element = [&](int row, int column) {
    const uint32_t pair = static_cast<const MatrixLane*>(operands[row])->row[column / 2];
    return column % 2 == 0 ? pair & 0xffffu : pair >> 16;
  };
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < kCount; ++i) {
      const int row = 8 * i + lane % 4 * 2, column = lane / 4;
      static_cast<const MatrixLane*>(operands[lane])->r[i] =
          element(row, column) | element(row + 1, column) << 16;
    }
  }
}

template <int kCount>
void store_matrices(void* const* operands) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < kCount; ++i) {
      auto& target = *static_cast<MatrixLane*>(operands[8 * i + lane / 4]);
      target.row[lane % 4] = static_cast<const MatrixLane*>(operands[lane])->r[i];
    }
  }
}

// By the logarithm of the number of matrices.
constexpr Collective kLoad[] = {{"ldmatrix<1>", load_matrices<1>},
                                {"ldmatrix<2>", load_matrices<2>},
                                {"ldmatrix<4>", load_matrices<4>}};
constexpr Collective kLoadTransposed[] = {{"ldmatrix_trans<1>", load_transposed<1>},
                                          {"ldmatrix_trans<2>", load_transposed<2>},
                                          {"ldmatrix_trans<4>", load_transposed<4>}};
constexpr Collective kStore[] = {{"stmatrix<1>", store_matrices<1>},
                                 {"stmatrix<2>", store_matrices<2>},
                                 {"stmatrix<4>", store_matrices<4>}};

// ---------------------------------------------------------------- mma

constexpr int kM = 16, kN = 8, kK = 16;

struct MmaLane {
  float* c;
  const uint32_t* a;
  uint32_t b0, b1;
};

// What every processor has registers for.
using Four = float __attribute__((vector_size(16)));
using FourWords = uint32_t __attribute__((vector_size(16)));

Four as_floats(FourWords bits) {
  Four x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

// The numbers of two registers; to_float() of each.
FourWords words_of(uint32_t first, uint32_t second) {
  return FourWords{first & 0xffffu, first >> 16, second & 0xffffu, second >> 16};
}
template <typename Format>
Four to_floats(uint32_t first, uint32_t second) {
  const FourWords h = words_of(first, second);
  if constexpr (std::is_same_v<Format, BFloat16>) return as_floats(h << 16);
  const FourWords sign = (h & 0x8000u) << 16, magnitude = (h & 0x7fffu) << 13;
  const Four finite = as_floats(magnitude) * bits_to_float((112u + 127u) << 23);
  FourWords bits;
  __builtin_memcpy(&bits, &finite, sizeof(bits));
  const FourWords is_finite = FourWords(magnitude < 0x0f800000u);
  return as_floats(sign | (bits & is_finite) | ((magnitude | 0x7f800000u) & ~is_finite));
}

// Products are exact in fp32, sums are rounded to it in an order of their own: that of k = 0, 1, 8, 9, 2, 3,
// 10, 11 ..., in which a lane's registers hold neighbours.
template <typename Format>
void multiply_matrices(void* const* operands) {
  float a[kM][kK], b[kK][kN], c[kM][kN];
  for (int lane = 0; lane < 32; ++lane) {
    const MmaLane& self = *static_cast<const MmaLane*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 2; ++i) {
      const Four row = to_floats<Format>(self.a[i], self.a[i + 2]);
      __builtin_memcpy(&a[g + 8 * i][4 * t], &row, sizeof(row));
      __builtin_memcpy(&c[g + 8 * i][2 * t], &self.c[2 * i], 2 * sizeof(float));
    }
    const Four column = to_floats<Format>(self.b0, self.b1);
    for (int i = 0; i < 4; ++i) b[4 * t + i][g] = column[i];
  }
  constexpr int kRows = 4;  // at a time
  for (int m = 0; m < kM; m += kRows) {
    Four sum[kRows][2];
    __builtin_memcpy(sum, c[m], sizeof(sum));
    for (int k = 0; k < kK; ++k) {
      Four row[2];
      __builtin_memcpy(row, b[k], sizeof(row));
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        sum[i][0] += a[m + i][k] * row[0];
        sum[i][1] += a[m + i][k] * row[1];
      }
    }
    __builtin_memcpy(c[m], sum, sizeof(sum));
  }
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    float* const target = static_cast<const MmaLane*>(operands[lane])->c;
    for (int i = 0; i < 2; ++i) {
      __builtin_memcpy(&target[2 * i], &c[g + 8 * i][2 * t], 2 * sizeof(float));
    }
  }
}

constexpr Collective kMmaHalf{"mma<__half>", multiply_matrices<Half>};
constexpr Collective kMmaBFloat16{"mma<__nv_bfloat16>", multiply_matrices<BFloat16>};

}  // namespace

void ldmatrix(uint32_t* r, int count, bool transposed, const void* row, Site site) {
  const Collective& collective = (transposed ? kLoadTransposed : kLoad)[count / 2];
  MatrixLane self{r, {}};
  if (lane_id() < 8 * count) {
    if constexpr (kChecked) checker::access_row(row, false, __builtin_return_address(0));
    require_address(collective.name, row, sizeof(self.row), true, site);
    std::memcpy(self.row, row, sizeof(self.row));
  }
  warp_collective(collective, &self, site);
}

void stmatrix(void* row, const uint32_t* r, int count, Site site) {
  const Collective& collective = kStore[count / 2];
  MatrixLane self{const_cast<uint32_t*>(r), {}};
  const bool has_row = lane_id() < 8 * count;
  if (has_row) {
    if constexpr (kChecked) checker::access_row(row, true, __builtin_return_address(0));
    require_address(collective.name, row, sizeof(self.row), true, site);
  }
  warp_collective(collective, &self, site);
  if (has_row) std::memcpy(row, self.row, sizeof(self.row));
}

void mma_half(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, Site site) {
  MmaLane self{c, a, b0, b1};
  warp_collective(kMmaHalf, &self, site);
}

void mma_bfloat16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, Site site) {
  MmaLane self{c, a, b0, b1};
  warp_collective(kMmaBFloat16, &self, site);
}

}  // namespace cpu_device
