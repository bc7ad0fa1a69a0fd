// A point in the order of a device's stream: the work that was on the stream when the point was
// made. Other streams and the host wait for it.
//
// Threads: any; copies share one event. While another thread captures a CUDA graph, has_happened()
// and wait() do not disturb it. Blocking: wait() only, until its deadline. Lifetime: a StreamPoint
// may outlive its wait and may be destroyed before its work has ended. Errors: c10::Error for what
// the driver reports, from each method that does not return a Status, and for a stream of another
// type of device. Source: CUDA's events.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/collective/completion.h"

namespace c10 {
struct Event;
}
namespace cadre::os {
class System;
}

namespace cadre::device {

class CADRE_EXPORT StreamPoint final : public DevicePoint {
 public:
  explicit StreamPoint(const c10::Stream& stream);
  // Returns a point on the stream of the device that is current in this thread.
  static StreamPoint on_current_stream(c10::Device device);

  // A copy instead of a move leaves no object without an event.
  StreamPoint(const StreamPoint&) = default;
  StreamPoint& operator=(const StreamPoint&) = default;
  ~StreamPoint() override = default;

  const c10::Stream& stream() const { return stream_; }

  // Orders what is enqueued on `later` from now on behind this point. The host does not wait.
  void block(const c10::Stream& later) const;
  // Does this for the stream that is current in this thread, of the device of this point. Returns
  // what the driver reports as kInternal.
  Status order_current_stream() const override;

  bool has_happened() const;
  // Waits on the host. Returns kTimeout if the work has not ended at the deadline. Throws
  // c10::Error if a kernel failed. The host polls, asleep in between, so that it can end the wait.
  Status wait(os::System& system, Deadline deadline) const;

 private:
  c10::Stream stream_;
  std::shared_ptr<const c10::Event> event_;  // shared by the copies, because c10's cannot be copied
};

// Keeps the memory of a tensor on a device, once it is freed, from being used again before the work
// that is now on the current stream has ended. Memory of the device's allocator is otherwise only
// kept for the stream on which it was allocated. Does nothing for the CPU.
void hold_for_current_stream(const at::Tensor& tensor);

}  // namespace cadre::device
