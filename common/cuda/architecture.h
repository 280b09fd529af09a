// The architecture that a build is for: one, as host and device code must agree on the sizes of tiles.
#pragma once

// Ten times the compute capability, e.g. 86. The CPU device models 9.0, unless it is told otherwise.
#if defined(FA2_COMPUTE_CAPABILITY)
constexpr int kComputeCapability = FA2_COMPUTE_CAPABILITY;
#elif defined(__CUDA_ARCH_LIST__)
constexpr int kComputeCapability = (__CUDA_ARCH_LIST__) / 10;
#else
constexpr int kComputeCapability = 90;
#endif

// Shared memory that a block can have. CUDA C++ Programming Guide, "Technical specifications per compute
// capability".
constexpr int max_shared_bytes(int compute_capability) {
  switch (compute_capability) {
    case 75: return 64 * 1024;
    case 80:
    case 87: return 163 * 1024;
    case 86:
    case 89:
    case 120: return 99 * 1024;
    default: return 227 * 1024;
  }
}
constexpr int kMaxSharedBytes = max_shared_bytes(kComputeCapability);
