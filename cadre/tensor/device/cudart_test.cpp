// Tests the functions of the CUDA runtime with one that this program exports.
#include "cadre/tensor/device/cudart.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

namespace {

thread_local int capture_mode = 0;

}  // namespace

// The dynamic linker finds this function in the program, as that of a CUDA runtime in a library.
// NOLINTNEXTLINE(readability-identifier-naming)
extern "C" __attribute__((visibility("default"))) int cudaThreadExchangeStreamCaptureMode(
    int* mode) {
  const int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return 0;
}

namespace cadre::device {
namespace {

TEST(RelaxedCaptureTest, ChangesTheModeOfTheThreadAsLongAsItExists) {
  if (cudart_function("cudaThreadExchangeStreamCaptureMode") !=
      reinterpret_cast<void*>(&cudaThreadExchangeStreamCaptureMode)) {
    GTEST_SKIP() << "the program does not export its functions, or there is a CUDA runtime";
  }
  capture_mode = 1;
  {
    const RelaxedCapture outer(c10::DeviceType::CUDA);
    EXPECT_EQ(capture_mode, 2);
    {
      const RelaxedCapture inner(c10::DeviceType::CUDA);
      EXPECT_EQ(capture_mode, 2);
    }
    EXPECT_EQ(capture_mode, 2);
  }
  EXPECT_EQ(capture_mode, 1);
  const RelaxedCapture other(c10::DeviceType::PrivateUse1);
  EXPECT_EQ(capture_mode, 1);
}

}  // namespace
}  // namespace cadre::device
