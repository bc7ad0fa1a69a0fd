// Runs the collectives of a group in the order of their numbers, one call at a time.
//
// Threads, blocking, lifetime and errors are those of ProgressQueue; the thread is
// "cadre-progress". An exception of the runner becomes the error of its operation. A blocking call
// that finds the queue idle runs its operation itself, without an allocation.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/fingerprint.h"
#include "cadre/core/collective/collective.h"
#include "cadre/core/collective/completion.h"
#include "cadre/core/comm/queue/progress_queue.h"
#include "cadre/core/comm/queue/work.h"

namespace cadre {

class SymmetricBuffer;

// One call in the queue: validated collectives with consecutive numbers, or an allocation of
// symmetric memory.
struct Operation {
  std::span<const Collective> collectives = {};  // is empty for an allocation
  // Has one entry for each collective; the ranks compare them.
  std::span<const Fingerprint> fingerprints = {};
  std::optional<Deadline> deadline = {};
  std::shared_ptr<const void> keep_alive = nullptr;
  std::string_view call = {};  // see CollectiveOptions::call
  uint64_t number = 0;         // the number of the first collective, from 1; the queue sets it
  std::shared_ptr<SymmetricBuffer> allocated = nullptr;  // the result of an allocation

  // Returns the type of the memory that the operation works on. All collectives of a call are for
  // the engine of this memory.
  DeviceType device_type() const {
    return collectives.empty() ? DeviceType::kCpu : collectives.front().device.type;
  }
};

// Runs one operation until it has ended, or enqueues it on a device stream.
class OperationRunner {
 public:
  // The operation, its collectives and its fingerprints are borrowed until run() returns.
  virtual Completion run(Operation& operation) = 0;

 protected:
  ~OperationRunner() = default;  // no owner holds a runner by this type
};

class OperationQueue final : public ProgressQueue {
 public:
  OperationQueue(os::System& system, OperationRunner& runner,
                 std::shared_ptr<const ForkGuard> fork_guard, std::shared_ptr<LogSink> log)
      : ProgressQueue(system, "cadre-progress", std::move(fork_guard), std::move(log)),
        runner_(runner) {}

  // Issues the operation and returns when it is done, or throws its error. On a device stream it
  // returns like Work::wait().
  void run(Operation& operation);
  // Issues the operation. Its Work keeps this queue alive.
  Work issue(Operation operation);
  // Does the same for an engine whose submit() does not block, and returns when the engine has the
  // operation: a library such as NCCL needs the calls of several groups on one device in the same
  // order on all ranks, so the order is that of the program. If operations before this one are left
  // to submit, or run on a blocking engine, the caller waits for them. In code that a queue of any
  // group runs (a callback or a deleter), where the wait could be for its own caller, a thread
  // submits the operation later.
  Work issue_here(Operation operation);

 private:
  class Issued;

  void advance(const IssuedOperation* until) override;
  void end_moving(const Error&) override {}  // advance() always ends an operation
  void wake_holder() override {}  // not needed: the holder looks for new operations after each one
  // Runs the operation in the calling thread, which holds the progress role, and gives the role
  // back. If the engine ends the call later, stores an Issued for it in `enqueued`.
  Completion run_alone(Operation& operation, std::shared_ptr<Issued>& enqueued);
  Completion run_caught(Operation& operation);
  void submit(Issued& issued);

  OperationRunner& runner_;
};

}  // namespace cadre
