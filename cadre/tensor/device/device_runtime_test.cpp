// Tests of the devices of one type: on the late device, and on a type with a guard of the tests.
#include "cadre/tensor/device/device_runtime.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/torch/late_device/late_device.h"

namespace cadre::device {
namespace {

namespace late = cadre::testing::late;

class DeviceRuntimeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    late::register_device();
    late::set_delays({});
    runtime_ = find_devices(late::device().type()).runtime;
    ASSERT_TRUE(runtime_.has_value());
    runtime_->make_current(late::device(0));
  }
  void TearDown() override { late::synchronize_all(); }
  std::optional<DeviceRuntime> runtime_;
};

// Returns the text of the Error(kInvalidArgument) that `body` throws; empty if it throws none.
template <typename Body>
std::string refusal_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

TEST_F(DeviceRuntimeTest, CountsAndChoosesDevicesForEachThread) {
  EXPECT_EQ(find_devices(late::device().type()).reason, "");
  EXPECT_EQ(runtime_->type(), late::device().type());
  EXPECT_EQ(runtime_->num_devices(), late::kNumDevices);
  EXPECT_EQ(runtime_->current_device(), late::device(0));
  runtime_->make_current(late::device(3));
  EXPECT_EQ(runtime_->current_device(), late::device(3));
  int of_other_thread = -1;
  const auto system = os::make_native_system();
  system->spawn("other", [&] { of_other_thread = runtime_->current_device().index(); })->join();
  EXPECT_EQ(of_other_thread, 0);
}

TEST_F(DeviceRuntimeTest, RefusesWhatIsNoDeviceOfItsType) {
  const std::string name = late::device().str().substr(0, late::device().str().find(':'));
  const std::string valid =
      " is not a device of this process: it has " + name + ":0 to " + name + ":7";
  EXPECT_EQ(refusal_of([&] { runtime_->make_current(late::device(8)); }), name + ":8" + valid);
  EXPECT_EQ(refusal_of([&] { runtime_->current_stream(late::device(8)); }), name + ":8" + valid);
  EXPECT_EQ(refusal_of([&] { runtime_->memory({late::device().type()}); }), name + valid);
  EXPECT_EQ(refusal_of([&] { runtime_->memory(c10::DeviceType::CPU); }), "cpu" + valid);
  EXPECT_EQ(refusal_of([&] {
              runtime_->pooled_stream({c10::DeviceType::CUDA, 0}, StreamPriority::kHigh);
            }),
            "cuda:0" + valid);
  const c10::Stream of_cpu(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU, 0));
  EXPECT_EQ(refusal_of([&] { runtime_->native_handle(of_cpu); }), "cpu:0" + valid);
  EXPECT_EQ(refusal_of([&] { runtime_->is_capturing(of_cpu); }), "cpu:0" + valid);
  EXPECT_EQ(runtime_->current_device(), late::device(0));
}

TEST_F(DeviceRuntimeTest, KnowsTheCurrentStreamAndThePool) {
  const c10::Device device = late::device(2);
  const c10::Stream before = runtime_->current_stream(device);
  for (const auto priority : {StreamPriority::kNormal, StreamPriority::kHigh}) {
    const c10::Stream pooled = runtime_->pooled_stream(device, priority);
    EXPECT_NE(pooled, before);
    EXPECT_EQ(pooled.device(), device);
    EXPECT_FALSE(runtime_->is_capturing(pooled));
    const c10::StreamGuard guard(pooled);
    EXPECT_EQ(runtime_->current_stream(device), pooled);
  }
  EXPECT_EQ(runtime_->current_stream(device), before);
}

TEST_F(DeviceRuntimeTest, ReportsMemory) {
  constexpr size_t kBytes = size_t{3} << 20;
  const c10::Device device = late::device(5);
  const auto allocate = [&](size_t num_bytes) {
    return at::empty({static_cast<int64_t>(num_bytes)},
                     at::TensorOptions().device(device).dtype(at::kByte));
  };
  const DeviceMemory before = runtime_->memory(device);
  at::Tensor tensor = allocate(kBytes);
  const DeviceMemory during = runtime_->memory(device);
  EXPECT_EQ(during.allocated_bytes, before.allocated_bytes + kBytes);
  EXPECT_GE(during.reserved_bytes, kBytes);
  EXPECT_EQ(during.reserved_bytes - before.reserved_bytes, before.free_bytes - during.free_bytes);
  EXPECT_EQ(during.total_bytes, before.total_bytes);
  EXPECT_EQ(during.peak_allocated_bytes, during.allocated_bytes);
  EXPECT_EQ(during.peak_reserved_bytes, during.reserved_bytes);
  tensor = at::Tensor();
  const DeviceMemory after = runtime_->memory(device);
  EXPECT_EQ(after.allocated_bytes, before.allocated_bytes);
  EXPECT_EQ(after.reserved_bytes, during.reserved_bytes);
  EXPECT_EQ(after.peak_allocated_bytes, during.allocated_bytes);
  runtime_->reset_peaks(device);
  EXPECT_EQ(runtime_->memory(device).peak_allocated_bytes, before.allocated_bytes);
  EXPECT_EQ(runtime_->memory(late::device(6)).allocated_bytes, 0U);
}

TEST_F(DeviceRuntimeTest, HasPinnedMemoryThatStreamsMayUse) {
  at::HostAllocator* const allocator = runtime_->pinned_allocator();
  ASSERT_NE(allocator, nullptr);
  const c10::Stream stream = runtime_->current_stream(late::device(0));
  c10::DataPtr first = allocator->allocate(64);
  void* const address = first.get();
  const late::StreamHold hold(stream);
  EXPECT_TRUE(allocator->record_event(address, first.get_context(), stream));
  first.clear();
  EXPECT_NE(allocator->allocate(64).get(), address);  // the stream may still read the first
}

// A type of device that no test has otherwise, whose guard has what the late device's has not.
// `override` is left out, because older versions of torch lack one of the functions.
class GuardOfTests : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::FPGA> {
 public:
  c10::DeviceIndex deviceCount() const noexcept { return num_devices; }
  void* getStreamNativeHandle(const c10::Stream stream) const {
    return reinterpret_cast<void*>(0x1000 + stream.id());
  }
  bool isStreamCapturing(const c10::Stream& stream) const { return stream.id() == 2; }

  c10::DeviceIndex num_devices = 0;
};

// What the version of torch has.
template <typename Guard>
concept GivesHandles = requires(const Guard& guard, const c10::Stream& stream) {
  guard.getStreamNativeHandle(stream);
};
template <typename Guard>
concept KnowsCaptures =
    requires(const Guard& guard, const c10::Stream& stream) { guard.isStreamCapturing(stream); };

TEST(DeviceRuntimeOfAnotherType, GivesHandlesAndCapturesOfStreams) {
  static GuardOfTests guard;  // a runtime may keep it until the process ends
  constexpr auto kType = c10::DeviceType::FPGA;
  EXPECT_FALSE(find_devices(kType).runtime.has_value());
  EXPECT_NE(find_devices(kType).reason.find("is a build without fpga devices"), std::string::npos);
  guard.num_devices = 0;
  c10::impl::registerDeviceGuard(kType, &guard);
  EXPECT_FALSE(find_devices(kType).runtime.has_value());
  EXPECT_NE(find_devices(kType).reason.find("finds no fpga device"), std::string::npos);
  guard.num_devices = 1;
  const auto runtime = find_devices(kType).runtime;
  ASSERT_TRUE(runtime.has_value());
  const c10::Stream second(c10::Stream::UNSAFE, c10::Device(kType, 0), 2);
  const c10::Stream third(c10::Stream::UNSAFE, c10::Device(kType, 0), 3);
  if (GivesHandles<c10::impl::DeviceGuardImplInterface>) {
    EXPECT_EQ(runtime->native_handle(second), reinterpret_cast<void*>(0x1002));
  } else {
    EXPECT_NE(refusal_of([&] { runtime->native_handle(second); }), "");
  }
  EXPECT_EQ(runtime->is_capturing(second), KnowsCaptures<c10::impl::DeviceGuardImplInterface>);
  EXPECT_FALSE(runtime->is_capturing(third));
  c10::impl::registerDeviceGuard(kType, nullptr);
}

}  // namespace
}  // namespace cadre::device
