#include "cadre/tensor/device/stream_point.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/system.h"
#include "cadre/tensor/device/cudart.h"

namespace cadre::device {
namespace {

// The times between two polls, which double from the first to the last. Short work is seen soon,
// and a long wait costs little.
constexpr Duration kFirstNap = std::chrono::microseconds(20);
constexpr Duration kLastNap = std::chrono::milliseconds(1);

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

StreamPoint::StreamPoint(const c10::Stream& stream) : stream_(stream) {
  auto event = std::make_shared<c10::Event>(stream.device_type());
  event->record(stream);
  event_ = std::move(event);
}

StreamPoint StreamPoint::on_current_stream(c10::Device device) {
  return StreamPoint(current_stream(device));
}

void StreamPoint::block(const c10::Stream& later) const {
  event_->block(later);
}

Status StreamPoint::order_current_stream() const {
  try {
    block(current_stream(stream_.device()));
  } catch (const std::exception& thrown) {
    return Error(ErrorCode::kInternal, format("{}: {}", stream_.device().str(), thrown.what()));
  }
  return {};
}

void hold_for_current_stream(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(tensor.device()));
}

bool StreamPoint::has_happened() const {
  const RelaxedCapture relaxed(stream_.device_type());
  return event_->query();
}

Status StreamPoint::wait(os::System& system, Deadline deadline) const {
  const TimePoint begin = system.now();
  const auto waiter = system.make_waiter();
  for (Duration nap = kFirstNap; !has_happened(); nap = std::min(nap * 2, kLastNap)) {
    if (deadline.has_passed(system.now())) {
      const auto waited =
          std::chrono::duration_cast<std::chrono::milliseconds>(system.now() - begin);
      return Error(ErrorCode::kTimeout,
                   format("the work on stream {} of {} has not ended after {} ms: give more time, "
                          "or look for what the stream waits for",
                          stream_.id(), stream_.device().str(), waited.count()));
    }
    waiter->park(system.deadline_in(nap).earlier(deadline));
  }
  const RelaxedCapture relaxed(stream_.device_type());
  event_->synchronize();  // returns at once, and throws the failure of a kernel
  return {};
}

}  // namespace cadre::device
