// Runs the collectives of a group in the order of their numbers, one at a time.
//
// Threads, blocking, lifetime, errors: as ProgressQueue; the thread is "cadre-progress". What the
// runner throws becomes the error of its operation. A blocking call that finds the queue idle runs
// its operation itself, without an allocation.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/collective/collective.h"
#include "cadre/collective/op.h"
#include "cadre/comm/communicator.h"
#include "cadre/comm/queue/progress_queue.h"
#include "cadre/comm/work.h"

namespace cadre {

// A validated collective, or an allocation of symmetric memory, on its way through the queue.
struct Operation {
  OpDescriptor descriptor;     // what the ranks compare
  Collective collective = {};  // of all kinds but kAllocate
  std::optional<Deadline> deadline = {};
  std::shared_ptr<const void> keep_alive = nullptr;
  uint64_t number = 0;                                   // set by the queue, from 1
  std::shared_ptr<SymmetricBuffer> allocated = nullptr;  // the result of kAllocate
};

// Runs one operation to its end.
class OperationRunner {
 public:
  virtual Status run(Operation& operation) = 0;

 protected:
  ~OperationRunner() = default;  // nobody owns one by this type
};

class OperationQueue final : public ProgressQueue {
 public:
  OperationQueue(os::System& system, OperationRunner& runner,
                 std::shared_ptr<const ForkGuard> fork_guard)
      : ProgressQueue(system, "cadre-progress", std::move(fork_guard)), runner_(runner) {}

  // Issues the operation and returns when it is done, or throws its error.
  void run(Operation& operation);
  // Issues the operation; a Work of it keeps this queue.
  Work issue(Operation operation);

 private:
  class Issued;

  void advance(const IssuedOperation* until) override;
  void end_moving(const Error&) override {}  // the front is run in one piece
  void wake_holder() override {}             // it looks for more after each operation
  Status run_caught(Operation& operation);

  OperationRunner& runner_;
};

}  // namespace cadre
