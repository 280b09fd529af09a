// assert() in device code ends the launch, not the process. Like the C header, this may be included again,
// with or without NDEBUG.
#include_next <assert.h>

#ifndef NDEBUG
#undef assert
#define assert(condition) \
  ((condition) ? (void)0 : ::cpu_device::fail_assert(#condition, __FILE__, __LINE__))
#endif

#ifndef CPU_DEVICE_ASSERT_H
#define CPU_DEVICE_ASSERT_H
namespace cpu_device {
[[noreturn]] void fail_assert(const char* condition, const char* file, int line);
}  // namespace cpu_device
#endif
