// A future for the result of a submitted collective. An engine that runs the collective in the
// calling thread returns a Completion that is done; an engine that only enqueues it on a device
// stream returns a pending one.
//
// Threads: any; complete() is called once, by the thread that observes the end. Blocking: never.
// Lifetime: a cheap value over shared state. Callbacks run exactly once, never under a lock: in the
// thread that calls complete(), or, if the Completion is done, in the thread that calls on_done().
// Errors: none of its own; callbacks must not throw.
// Source: std::promise, but without a blocking wait; order_current_stream() is like c10d's
// ProcessGroupNCCL::WorkNCCL::wait(), which makes the current stream wait for an event.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre {

// A point in the work of a device: it is reached when the work that was enqueued before it has been
// done. It orders a collective behind the work of its caller, and the caller's next work behind the
// collective. The code below the torch line knows devices by this interface only. A point may be
// destroyed before it is reached. Source: CUDA's events: cudaEventRecord() makes a point, and
// cudaStreamWaitEvent() orders behind it.
class CADRE_EXPORT DevicePoint {
 public:
  DevicePoint() = default;
  virtual ~DevicePoint() = default;

  // Orders the work that the calling thread enqueues from now on behind this point, on the stream
  // of the point's device that is current in this thread. Does not wait on the host.
  virtual Status order_current_stream() const = 0;

 protected:
  DevicePoint(const DevicePoint&) = default;
  DevicePoint& operator=(const DevicePoint&) = default;
};

class Completion {
 public:
  using Callback = std::function<void(const Status&)>;

  // Makes a Completion that is done.
  Completion(Status status) : status_(std::move(status)) {}          // NOLINT: implicit by design
  Completion(Error error) : Completion(Status(std::move(error))) {}  // NOLINT: implicit by design
  // Makes a Completion that is pending until complete() is called on it or on a copy of it. A
  // stream-ordered engine passes the point that the device reaches at the end of the operation.
  static Completion make_pending(std::shared_ptr<const DevicePoint> end = nullptr) {
    return Completion(std::make_shared<Shared>(std::move(end)));
  }

  bool is_done() const {
    return pending_ == nullptr || pending_->is_done.load(std::memory_order_acquire);
  }
  // Returns the result of the collective. REQUIRES: is_done().
  const Status& status() const { return pending_ == nullptr ? status_ : pending_->status; }
  // Returns whether order_current_stream() can make a device stream wait for the operation, so that
  // no thread has to wait: true for a stream-ordered engine, and for every Completion that is done.
  bool is_stream_ordered() const { return is_done() || pending_->end != nullptr; }
  // Returns the point that the device reaches at the end of the operation; null if the operation is
  // done or the engine is not stream-ordered.
  std::shared_ptr<const DevicePoint> end() const { return is_done() ? nullptr : pending_->end; }
  // Orders the work that the calling thread enqueues from now on, on its current stream of the
  // device, behind the operation. Returns the status of an operation that is done. REQUIRES:
  // is_stream_ordered().
  Status order_current_stream() const {
    return is_done() ? status() : pending_->end->order_current_stream();
  }
  // Runs `callback` with the status: now, if the Completion is done, else when complete() is
  // called.
  void on_done(Callback callback) const {
    if (pending_ != nullptr) {
      std::lock_guard lock(pending_->mutex);
      if (!pending_->is_done.load(std::memory_order_relaxed)) {
        pending_->callbacks.push_back(std::move(callback));
        return;
      }
    }
    callback(status());
  }
  // Sets the result and runs the callbacks. REQUIRES: this value was made by make_pending(), and
  // complete() was not called for it before.
  void complete(Status status) const {
    std::vector<Callback> callbacks;
    {
      std::lock_guard lock(pending_->mutex);
      pending_->status = std::move(status);
      pending_->is_done.store(true, std::memory_order_release);
      callbacks.swap(pending_->callbacks);
    }
    for (const Callback& callback : callbacks) callback(pending_->status);
  }

 private:
  struct Shared {
    explicit Shared(std::shared_ptr<const DevicePoint> at_end) : end(std::move(at_end)) {}

    const std::shared_ptr<const DevicePoint> end;  // null if the engine is not stream-ordered
    std::mutex mutex;
    Status status;  // is written before is_done is set, and only read when is_done is true
    std::atomic<bool> is_done{false};
    std::vector<Callback> callbacks;
  };
  explicit Completion(std::shared_ptr<Shared> pending) : pending_(std::move(pending)) {}

  Status status_;  // the result of a Completion that was done when it was made
  std::shared_ptr<Shared> pending_ = nullptr;
};

}  // namespace cadre
