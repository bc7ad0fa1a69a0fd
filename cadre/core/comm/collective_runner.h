// Runs the collectives of a group on its engine, and turns each error into the group's one failure,
// with the rank at fault.
//
// Threads: the holder of the progress role calls run(). Calls that are enqueued on a device end in
// a thread of the engine. Other methods may be called from any thread. While calls are enqueued on
// an engine, or its submit() has not returned, a thread "cadre-watch" compares the oldest call with
// those of the peers if it does not end. That thread also fails the group when the deadline of an
// enqueued call passes, and ends calls that the engine does not end after a failure. It starts
// before the engine gets the call.
// Blocking: run(), until the operation's deadline, and after a failure for the time in which this
// rank polls its peers (Monitor::kAskTime, kDoubtTime); a thread that reports an error later blocks
// for that time, too. stop(), until the watch thread has ended what it does. Lifetime: borrows the
// objects in its Parts. When the runner is destroyed, the engine must have ended all calls that it
// has enqueued, except for abandoned ones. Errors: the group's failure.
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
#include "cadre/core/comm/engine_set.h"
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
    const EngineSet& engines;
    SymmetricHeap* heap;  // allocates symmetric memory
    Duration timeout;     // the timeout of operations that have no deadline
  };
  // The interval at which the watch thread checks whether it must end.
  static constexpr Duration kWatchTime = std::chrono::milliseconds(20);

  // How long a call is the oldest one that has not ended before it is first compared with those of
  // the peers.
  static constexpr Duration kCompareTime = std::chrono::seconds(1);
  // How long a failed group waits for the device to end calls that the engine has aborted.
  static constexpr Duration kAbandonTime = std::chrono::seconds(3);

  explicit CollectiveRunner(const Parts& parts)
      : parts_(parts), watch_(parts.system, "cadre-watch") {}

  Completion run(Operation& operation) override;
  Duration time_spent() const { return Duration(time_spent_ns_.load(std::memory_order_relaxed)); }
  // Joins the watch thread. REQUIRES: no further call is started.
  void stop();
  // Returns whether the engine still works on a call that was abandoned. If so, the memory of that
  // call is still in use.
  bool has_abandoned() const;

 private:
  class Record;
  struct Enqueued;
  // A call that has begun. `context` belongs to the collective of the call that is running, or that
  // has failed.
  struct Running {
    OpContext context;
    TimePoint began;

    Running at_failed() const { return {context.from(context.progress.index()), began}; }
  };

  // The last call that began while the cell of the status page showed an enqueued one.
  struct Hidden {
    uint64_t number;
    Fingerprint fingerprint;
    TimePoint began;
    std::optional<FlightRecorder::Ending> ending;  // nullopt while the call runs
  };
  // A call that may have to be compared with those of the peers.
  struct LateCall {
    uint64_t number;
    Fingerprint fingerprint;
    Deadline deadline;
    TimePoint began;
  };
  // The time of the next comparison of the oldest call. Used by the watch thread only.
  struct Comparison {
    uint64_t number = 0;
    TimePoint since = {};  // the time at which it became the oldest
    Duration next_age = kCompareTime;
  };
  void hide(const Hidden& call);
  void end_hidden(uint64_t number, const FlightRecorder::Ending& ending);
  void show_hidden();

  // Executes the operation. An exception of the engine becomes the failure of the group.
  Completion execute_caught(Operation& operation, const Running& call);
  Completion execute(std::span<const Collective> collectives, const OpContext& context);
  const Capabilities& capabilities_for(const Operation& operation) const;
  bool is_watched(const Operation& operation) const;
  bool is_to_be_scaled(const Collective& collective) const;
  std::vector<Collective> premultiplied(std::span<const Collective> collectives);
  Status allocate(Operation& operation, const OpContext& context);
  // Waits until the engine has ended the call. Returns an error if the group fails, or the deadline
  // passes, before that.
  Status wait_for_end(const Completion& completion, Deadline deadline);
  // Does the same as wait_for_end(), but returns the status of the call. The engine keeps `memory`
  // until the call has ended.
  Status await(const Completion& completion, std::shared_ptr<const void> memory, Deadline deadline);
  // Waits until all calls that this engine has enqueued have ended.
  Status await_enqueued(const Backend* engine, Deadline deadline);
  // Ends a call. If it has an error, fails the group with it and returns the failure of the group.
  Status conclude(const Running& call, const Status& status);
  // Called when the engine has enqueued the call, which ends when `completion` is done. Returns a
  // Completion that is done when the runner has also recorded the end of the call.
  Completion follow(const Operation& operation, const Running& call, const Completion& completion,
                    uint64_t first_entry);
  Status end_enqueued(const std::shared_ptr<Enqueued>& call, const Status& status);
  void show(const Enqueued& call);
  // Starts the watch thread. Called before the engine gets the call: if no thread can be started,
  // the call throws, and the engine must not have begun to work on its memory.
  void begin_watch(const Running& call);
  void end_submission();
  void watch();
  // Fails the group if an enqueued call has reached its deadline.
  void fail_overdue();
  std::optional<LateCall> oldest_call() const;
  // Fails the group if a peer has made another call with the number of the oldest one.
  void compare_late(Comparison& comparison);
  // Ends enqueued calls with the failure of the group, although the engine has not ended them: at
  // once those that the engine cannot abort, and the others kAbandonTime after the failure.
  void abandon_enqueued(Duration since_failure);
  Error abandoned_error(const Capabilities& engine) const;
  // Fails the group with a failure that is composed from the error and the progress that the engine
  // has reported.
  void explain(const Running& call, const Error& error);
  void explain_timeout(const Running& call);
  void explain_loss(const Running& call, const Error& error);
  void explain_mismatch(const Running& call);
  void explain_part_mismatch(const Running& call);
  int waiting_for(const OpProgress& progress) const;
  void fail(const Running& call, Failure failure);
  wire::Activity activity_of(const Running& call) const;

  Parts parts_;
  std::vector<std::byte> scaled_;  // scaled inputs of PREMUL_SUMs that have a smaller output
  std::atomic<int64_t> time_spent_ns_{0};
  mutable std::mutex mutex_;  // guards the members below, except for the atomics
  std::deque<std::shared_ptr<Enqueued>> enqueued_;  // the engine's thread uses it, too
  std::atomic<size_t> num_enqueued_{0};
  std::optional<Hidden> hidden_;  // guarded by mutex_
  // The memory of abandoned calls. An entry expires when the engine has ended its call.
  std::vector<std::weak_ptr<const void>> abandoned_;
  IdleThread watch_;
  std::optional<LateCall> submitted_;  // the call whose submit() has not returned
  std::atomic<bool> is_stopping_{false};
};

}  // namespace cadre
