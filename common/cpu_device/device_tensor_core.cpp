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

struct Operands {
  float a[kM][kK], b[kK][kN];
};

using Row = float __attribute__((vector_size(kN * sizeof(float))));

// A product of two 16-bit numbers is exact in fp32, so a fused multiply-add changes nothing.
__attribute__((always_inline)) inline void multiply_add(const Operands& x, float (&c)[kM][kN]) {
  for (int m = 0; m < kM; ++m) {
    Row sum[2] = {};
    __builtin_memcpy(&sum[0], c[m], sizeof(Row));
    for (int k = 0; k < kK; k += 2) {
      Row b[2];
      __builtin_memcpy(b, x.b[k], sizeof(b));
      sum[0] += x.a[m][k] * b[0];
      sum[1] += x.a[m][k + 1] * b[1];
    }
    const Row result = sum[0] + sum[1];
    __builtin_memcpy(c[m], &result, sizeof(Row));
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void multiply_add_avx2(const Operands& x, float (&c)[kM][kN]) {
  multiply_add(x, c);
}
const bool kHasAvx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif

template <typename Format>
void multiply_matrices(void* const* operands) {
  Operands x;
  float c[kM][kN];
  for (int lane = 0; lane < 32; ++lane) {
    const MmaLane& self = *static_cast<const MmaLane*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      float* const pair = &x.a[g + i % 2 * 8][2 * t + i / 2 * 8];
      pair[0] = Format::to_float(uint16_t(self.a[i]));
      pair[1] = Format::to_float(uint16_t(self.a[i] >> 16));
      c[g + i / 2 * 8][2 * t + i % 2] = self.c[i];
    }
    x.b[2 * t][g] = Format::to_float(uint16_t(self.b0));
    x.b[2 * t + 1][g] = Format::to_float(uint16_t(self.b0 >> 16));
    x.b[2 * t + 8][g] = Format::to_float(uint16_t(self.b1));
    x.b[2 * t + 9][g] = Format::to_float(uint16_t(self.b1 >> 16));
  }
#if defined(__x86_64__)
  if (kHasAvx2) {
    multiply_add_avx2(x, c);
  } else {
    multiply_add(x, c);
  }
#else
  multiply_add(x, c);
#endif
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    float* const target = static_cast<const MmaLane*>(operands[lane])->c;
    for (int i = 0; i < 4; ++i) target[i] = c[g + i / 2 * 8][2 * t + i % 2];
  }
}

constexpr Collective kMmaHalf{"mma<__half>", multiply_matrices<Half>};
constexpr Collective kMmaBFloat16{"mma<__nv_bfloat16>", multiply_matrices<BFloat16>};

}  // namespace

void ldmatrix(uint32_t* r, int count, bool transposed, const void* row, Site site) {
  const Collective& collective = (transposed ? kLoadTransposed : kLoad)[count / 2];
  MatrixLane self{r, {}};
  if (lane_id() < 8 * count) {
    require_address(collective.name, row, sizeof(self.row), true, site);
    std::memcpy(self.row, row, sizeof(self.row));
  }
  warp_collective(collective, &self, site);
}

void stmatrix(void* row, const uint32_t* r, int count, Site site) {
  const Collective& collective = kStore[count / 2];
  MatrixLane self{const_cast<uint32_t*>(r), {}};
  const bool has_row = lane_id() < 8 * count;
  if (has_row) require_address(collective.name, row, sizeof(self.row), true, site);
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
