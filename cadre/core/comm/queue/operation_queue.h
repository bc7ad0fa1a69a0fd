// Runs the collectives of a group in the order of their numbers, one call at a time.
//
// Threads, blocking, lifetime, errors: as ProgressQueue; the thread is "cadre-progress". What the
// runner throws becomes the error of its operation. A blocking call that finds the queue idle runs
// its operation itself, without an allocation.
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

// One call on its way through the queue: validated collectives with numbers one after the other, or
// an allocation of symmetric memory.
struct Operation {
  std::span<const Collective> collectives = {};    // empty for an allocation
  std::span<const Fingerprint> fingerprints = {};  // one for each; what the ranks compare
  std::optional<Deadline> deadline = {};
  std::shared_ptr<const void> keep_alive = nullptr;
  std::string_view call = {};                            // as in CollectiveOptions
  uint64_t number = 0;                                   // the first's; set by the queue, from 1
  std::shared_ptr<SymmetricBuffer> allocated = nullptr;  // the result of an allocation
};

// Runs one operation to its end, or enqueues it on a device stream.
class OperationRunner {
 public:
  // The operation, its collectives and fingerprints are borrowed until it returns.
  virtual Completion run(Operation& operation) = 0;

 protected:
  ~OperationRunner() = default;  // nobody owns one by this type
};

class OperationQueue final : public ProgressQueue {
 public:
  OperationQueue(os::System& system, OperationRunner& runner,
                 std::shared_ptr<const ForkGuard> fork_guard, std::shared_ptr<LogSink> log)
      : ProgressQueue(system, "cadre-progress", std::move(fork_guard), std::move(log)),
        runner_(runner) {}

  // Issues the operation and returns when it is done, or throws its error. On a device stream: as
  // Work::wait().
  void run(Operation& operation);
  // Issues the operation; a Work of it keeps this queue.
  Work issue(Operation operation);

 private:
  class Issued;

  void advance(const IssuedOperation* until) override;
  void end_moving(const Error&) override {}  // no operation is left half-way
  void wake_holder() override {}             // it looks for more after each operation
  // REQUIRES: the calling thread has the role, which is given back. Makes `enqueued` for what its
  // engine ends later.
  Completion run_alone(Operation& operation, std::shared_ptr<Issued>& enqueued);
  Completion run_caught(Operation& operation);

  OperationRunner& runner_;
};

}  // namespace cadre
