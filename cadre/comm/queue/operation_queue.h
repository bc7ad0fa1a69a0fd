// Numbers the collectives of a group and runs them in that order, one at a time, by whichever
// thread holds the progress role.
//
// Threads: all methods from any thread; one thread of its own ("cadre-progress") while asynchronous
// operations are issued (idle_thread.h). Blocking: run(), wait() of an issued operation, and
// drain(). No lock is held while an operation runs or a thread waits. Lifetime: shared by the Works
// it handed out, which may outlive the group; close() first, then the runner may go. Errors: those
// of the runner, thrown by run() and wait(), the same one each time; wait() in a forked child
// throws. What the runner throws becomes the error of its operation. issue() throws kUnavailable,
// and has issued nothing, when the thread cannot be started.
//
// Progress is a role: a blocking call that finds the queue empty runs its operation itself; a
// waiting caller runs the queue up to its own operation if nobody else does; else the thread does.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/base/types.h"
#include "cadre/collective/collective.h"
#include "cadre/collective/op.h"
#include "cadre/comm/communicator.h"
#include "cadre/comm/fork_guard.h"
#include "cadre/comm/queue/held_role.h"
#include "cadre/comm/queue/idle_thread.h"
#include "cadre/comm/work.h"
#include "cadre/os/system.h"

namespace cadre {

// A validated collective, or an allocation of symmetric memory, on its way through the queue.
struct Operation {
  OpDescriptor descriptor;     // what the ranks compare
  Collective collective = {};  // of all kinds but kAllocate
  std::optional<Deadline> deadline = {};
  std::shared_ptr<const void> keep_alive = nullptr;      // released without a lock held
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

class OperationQueue : public std::enable_shared_from_this<OperationQueue> {
 public:
  OperationQueue(os::System& system, OperationRunner& runner,
                 std::shared_ptr<const ForkGuard> fork_guard);
  ~OperationQueue();

  // Issues the operation and returns when it is done, or throws its error.
  void run(Operation& operation);
  // Issues the operation; a Work of it keeps this queue.
  Work issue(Operation operation);

  // Operations issued so far.
  uint64_t num_issued() const;
  // Whether nothing runs or waits, and no thread is about to look for more.
  bool is_idle() const;
  // Whether an operation has not ended.
  bool has_pending() const;
  // New operations throw `reason` from now on.
  void refuse(const Error& reason);
  // Until nothing is left (true) or the deadline has passed. Does not take the role: what is left
  // has a thread or a waiting caller.
  bool drain(Deadline deadline);
  // Joins the thread; what drain() left ends with an error. New operations throw from now on.
  void close();

 private:
  class Issued;  // Work::State
  friend class HeldRole<OperationQueue>;

  void wait_for(Issued& issued, std::optional<Deadline> deadline);
  // Under the lock; if it does not run. The result is to be joined without the lock.
  [[nodiscard]] std::unique_ptr<os::Thread> start_thread(OpKind first);
  bool try_take_role();  // under the lock
  Status run_caught(Operation& operation);
  void run_front();  // with the role, without the lock
  void release_role();
  void run_thread();
  void wake_successors();  // under the lock

  os::System& system_;
  OperationRunner& runner_;
  const std::shared_ptr<const ForkGuard> fork_guard_;  // shared with the group

  mutable std::mutex mutex_;
  bool is_front_running_ = false;
  std::deque<std::shared_ptr<Issued>> pending_;
  bool is_role_taken_ = false;
  bool is_stopping_ = false;
  uint64_t num_issued_ = 0;
  uint64_t num_ended_ = 0;
  // Of the holder of the role, without the lock: an operation that was never queued has ended, and
  // is counted when the role is given back.
  bool has_run_unqueued_ = false;
  std::optional<Error> refusal_;
  std::vector<os::Waiter*> waiting_;
  IdleThread thread_;
};

}  // namespace cadre
