// Runs the collectives of a group on its engine, and turns each error into the group's one failure,
// with the rank at fault.
//
// Threads: the holder of the progress role calls run(); calls that are enqueued on a device end in
// a thread of the engine; other methods from any thread. While calls are enqueued on an engine that
// cannot abort them, a thread "cadre-watch" ends those that reach their deadline or meet a failure
// of the group. It starts before the engine has the call.
// Blocking: run(), until the operation's deadline and the questions that follow a failure
// (Monitor::kAskTime, kDoubtTime); so do the threads that report an error later. stop(), for
// kWatchTime. Lifetime: borrows its parts; the engine must have ended what it has enqueued when the
// runner is destroyed, except for abandoned calls. Errors: the group's failure.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/collective/backend.h"
#include "cadre/core/comm/failure/monitor.h"
#include "cadre/core/comm/queue/idle_thread.h"
#include "cadre/core/comm/queue/operation_queue.h"
#include "cadre/core/comm/symmetric/symmetric_heap.h"
#include "cadre/core/fabric/flight/flight_recorder.h"
#include "cadre/core/os/system.h"

namespace cadre {

class CollectiveRunner final : public OperationRunner {
 public:
  struct Parts {
    os::System& system;
    Monitor& monitor;
    FlightRecorder& recorder;
    Backend* backend = nullptr;        // null for a world of one, whose operations are copies
    const Capabilities& capabilities;  // the capabilities of the backend
    SymmetricHeap* heap;               // allocates symmetric memory
    Duration timeout;                  // the limit for operations that have no deadline
  };
  // The longest sleep of the watch before it notices that it must end.
  static constexpr Duration kWatchTime = std::chrono::milliseconds(20);

  explicit CollectiveRunner(const Parts& parts)
      : parts_(parts), watch_(parts.system, "cadre-watch") {}

  Completion run(Operation& operation) override;
  Duration time_spent() const { return Duration(time_spent_ns_.load(std::memory_order_relaxed)); }
  // Joins the thread. REQUIRES: no call begins any more.
  void stop();
  // Returns whether the engine still works on a call that was abandoned, and so on the memory of
  // the call.
  bool has_abandoned() const;

 private:
  class Record;
  struct Enqueued;
  // A call that has begun. Its context is that of the collective that runs, or that has failed.
  struct Running {
    OpContext context;
    TimePoint began;

    Running at_failed() const { return {context.from(context.progress.index()), began}; }
  };

  // Executes the operation. An exception of the engine becomes the failure of the group, too.
  Completion execute_caught(Operation& operation, const Running& call);
  Completion execute(std::span<const Collective> collectives, const OpContext& context);
  bool is_to_be_scaled(const Collective& collective) const;
  std::vector<Collective> premultiplied(std::span<const Collective> collectives);
  Status allocate(Operation& operation, const OpContext& context);
  // Waits until the engine has ended the call. Returns an error if the group fails, or the deadline
  // passes, before that.
  Status wait_for_end(const Completion& completion, Deadline deadline);
  // Like wait_for_end(), but returns the status of the call, which works on `memory`.
  Status await(const Completion& completion, std::shared_ptr<const void> memory, Deadline deadline);
  // Waits until all enqueued calls have ended.
  Status await_enqueued(Deadline deadline);
  // Ends a call. If it has an error, fails the group with it and returns the failure of the group.
  Status conclude(const Running& call, const Status& status);
  // Called when the engine has enqueued the call, which the engine ends through `completion`.
  // Returns a Completion that is done when the call has ended.
  Completion follow(const Operation& operation, const Running& call, const Completion& completion,
                    uint64_t first_entry);
  Status end_enqueued(const std::shared_ptr<Enqueued>& call, const Status& status);
  void show(const Enqueued& call);
  // Called before the engine has the call: if no thread can be started, the call throws, and the
  // engine must not have begun to work on its memory.
  void begin_watch();
  void end_submission();
  void watch();
  // Fails the group if an enqueued call has reached its deadline.
  void fail_overdue();
  // Ends all enqueued calls with the failure of the group, although the engine has not ended them.
  void abandon_enqueued();
  Error abandoned_error() const;
  // Makes the failure of the group from what the engine reported.
  void explain(const Running& call, const Error& error);
  void explain_timeout(const Running& call);
  void explain_loss(const Running& call, const Error& error);
  void explain_mismatch(const Running& call);
  void explain_part_mismatch(const Running& call);
  int waiting_for(const OpProgress& progress) const;
  void fail(const Running& call, Failure failure);
  wire::Activity activity_of(const Running& call) const;

  Parts parts_;
  std::vector<std::byte> scaled_;  // the inputs of PREMUL_SUMs whose output is smaller
  std::atomic<int64_t> time_spent_ns_{0};
  mutable std::mutex mutex_;  // guards the members below, except for the atomics
  std::deque<std::shared_ptr<Enqueued>> enqueued_;  // the engine's thread uses it, too
  std::atomic<size_t> num_enqueued_{0};
  // The memory of abandoned calls. An entry expires when the engine has ended its call.
  std::vector<std::weak_ptr<const void>> abandoned_;
  IdleThread watch_;
  bool is_submitting_ = false;  // a call is being submitted, which the watch may have to end
  std::atomic<bool> is_stopping_{false};
};

}  // namespace cadre
