// Tests of points on streams of the late device, whose kernels run late.
#include "cadre/tensor/device/stream_point.h"

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "cadre/core/os/system.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/testing/torch/late_device/late_device.h"

namespace cadre::device {
namespace {

namespace late = cadre::testing::late;
using std::chrono::milliseconds;
using std::chrono::seconds;

class StreamPointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    late::register_device();
    late::set_delays({});
    runtime_ = find_devices(late::device().type()).runtime;
    ASSERT_TRUE(runtime_.has_value());
  }
  void TearDown() override { late::synchronize_all(); }

  c10::Stream stream(int device = 0) const {
    return runtime_->pooled_stream(late::device(device), StreamPriority::kNormal);
  }
  Status wait(const StreamPoint& point, Duration time) {
    return point.wait(*system_, system_->deadline_in(time));
  }

  // Returns what a kernel on `reading` reads of the 1 that a kernel on `writing` writes late, where
  // `order` may order the two streams. The write is held until the kernel has read, or until
  // `time` has passed.
  using Order = std::function<void(const StreamPoint& written, const c10::Stream& reading)>;
  int read_after_write(const c10::Stream& writing, const c10::Stream& reading, const Order& order,
                       Duration time = milliseconds(100)) {
    const auto value = std::make_shared<std::atomic<int>>(0);
    const auto seen = std::make_shared<std::atomic<int>>(-1);
    late::StreamHold hold(writing);
    late::enqueue(writing, [value] { *value = 1; });
    order(StreamPoint(writing), reading);
    late::enqueue(reading, [value, seen] { *seen = value->load(); });
    const StreamPoint read(reading);
    static_cast<void>(wait(read, time));
    hold.release();
    wait(read, seconds(20)).value_or_throw();
    return *seen;
  }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
  std::optional<DeviceRuntime> runtime_;
};

TEST_F(StreamPointTest, BlockOrdersAnotherStream) {
  const auto order = [](const StreamPoint& written, const c10::Stream& reading) {
    written.block(reading);
  };
  EXPECT_EQ(read_after_write(stream(), stream(), order), 1);
  EXPECT_EQ(read_after_write(stream(0), stream(1), order), 1);
}

TEST_F(StreamPointTest, WithoutBlockTheKernelReadsTooEarly) {
  EXPECT_EQ(read_after_write(
                stream(), stream(), [](const auto&, const auto&) {}, seconds(20)),
            0);
}

TEST_F(StreamPointTest, BlocksTheCurrentStreamOfTheThread) {
  const auto order = [](const StreamPoint& written, const c10::Stream& reading) {
    const c10::StreamGuard guard(reading);
    written.order_current_stream().value_or_throw();
  };
  EXPECT_EQ(read_after_write(stream(), stream(), order), 1);
  // What the stream that was not current reads is not ordered.
  const auto order_default = [](const StreamPoint& written, const c10::Stream&) {
    written.order_current_stream().value_or_throw();
  };
  EXPECT_EQ(read_after_write(stream(), stream(), order_default, seconds(20)), 0);
}

TEST_F(StreamPointTest, IsRecordedOnTheCurrentStreamOfTheThread) {
  const c10::Stream own = stream(4);
  const c10::StreamGuard guard(own);
  EXPECT_EQ(StreamPoint::on_current_stream(late::device(4)).stream(), own);
  EXPECT_EQ(StreamPoint::on_current_stream(late::device(3)).stream(),
            runtime_->current_stream(late::device(3)));
}

TEST_F(StreamPointTest, HasTheWorkBeforeItOnly) {
  const c10::Stream own = stream();
  const StreamPoint before(own);
  const late::StreamHold hold(own);
  const StreamPoint behind(own);
  EXPECT_TRUE(wait(before, seconds(20)).ok());
  EXPECT_TRUE(before.has_happened());
  EXPECT_FALSE(behind.has_happened());
}

TEST_F(StreamPointTest, WaitEndsAtItsDeadline) {
  const c10::Stream own = stream(1);
  late::StreamHold hold(own);
  const StreamPoint point(own);
  const TimePoint begin = system_->now();
  const std::clock_t cpu_begin = std::clock();
  const Status status = wait(point, milliseconds(400));
  const double cpu_seconds = static_cast<double>(std::clock() - cpu_begin) / CLOCKS_PER_SEC;
  const Duration waited = system_->now() - begin;
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kTimeout);
  EXPECT_GE(waited, milliseconds(400));
  EXPECT_LT(waited, seconds(10));
  EXPECT_LT(cpu_seconds, 0.2) << "the host must sleep between two polls";
  const std::string& said = status.error().message();
  EXPECT_EQ(said.find("the work on stream " + std::to_string(own.id()) + " of " +
                      late::device(1).str() + " has not ended after "),
            0U)
      << said;
  EXPECT_FALSE(wait(point, Duration::zero()).ok());
  hold.release();
  EXPECT_TRUE(wait(point, seconds(20)).ok());
  EXPECT_TRUE(wait(point, Duration::zero()).ok());  // what has ended needs no time
}

TEST_F(StreamPointTest, WaitThrowsTheFailureOfAKernel) {
  const c10::Stream own = stream();
  late::enqueue(own, [] { throw std::runtime_error("kernel 7 failed"); });
  const StreamPoint point(own);
  std::string said;
  try {
    static_cast<void>(wait(point, seconds(20)));
  } catch (const std::exception& error) {
    said = error.what();
  }
  EXPECT_NE(said.find("kernel 7 failed"), std::string::npos) << said;
}

TEST_F(StreamPointTest, CopiesAreOnePointAndOutliveEachOther) {
  const c10::Stream own = stream();
  late::StreamHold hold(own);
  auto point = std::make_unique<StreamPoint>(own);
  StreamPoint copy = *point;
  const StreamPoint moved = std::move(*point);
  EXPECT_FALSE(point->has_happened());  // a move leaves a point, too
  point.reset();
  StreamPoint(own).block(stream());  // destroyed before its work has ended
  EXPECT_FALSE(copy.has_happened());
  hold.release();
  EXPECT_TRUE(wait(copy, seconds(20)).ok());
  EXPECT_TRUE(moved.has_happened());
}

TEST_F(StreamPointTest, RefusesAStreamOfAnotherType) {
  const StreamPoint point(stream());
  EXPECT_THROW(point.block(c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU, 0))),
               c10::Error);
}

}  // namespace
}  // namespace cadre::device
