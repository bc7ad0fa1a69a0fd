// The common part of the queues of collectives and of messages: operations are numbered when they
// are issued, and the thread that holds the progress role makes progress on them until they end or
// are enqueued on a device.
//
// Threads: all public methods from any thread; two threads of the queue's own (idle_thread.h): one
// runs while asynchronous operations are pending, "cadre-callbacks" while callbacks are registered.
// Blocking: wait() of an operation, until it ends or the deadline of the wait; drain(); close(),
// until the threads have ended the operation and the callback that they run. No lock is held while
// operations move, a thread waits, or a callback or the deleter of a keep_alive runs. Lifetime:
// shared by the operations it issued, which may outlive the group; close() must be called before
// the objects that the derived queue borrows are destroyed. Errors: wait() throws the error of the
// operation, the same one each time, or what a callback threw; in a forked child it always throws.
// Issuing throws kUnavailable, and issues nothing, if the thread cannot be started.
//
// The progress role is the right to run the operations of the queue; one thread holds it at a time.
// A caller that waits takes the role when it is free, and releases it when its own operation has
// ended. The next waiting caller or the queue's thread then continues with the operations that are
// left. A caller with a deadline of its own does not take the role, since it could not stop in the
// middle of an operation.
//
// Callbacks run one after the other in a thread that has no other duty. So a callback that waits
// delays neither the thread that makes progress, nor a thread of an engine, nor a waiting caller,
// and the operations for which it waits can end. Callbacks of an operation that ends after close()
// run in the thread that ends it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/log.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/completion.h"
#include "cadre/core/comm/queue/idle_thread.h"
#include "cadre/core/comm/queue/work.h"
#include "cadre/core/fabric/fork_guard.h"
#include "cadre/core/os/system.h"

namespace cadre {

class ProgressQueue;

// The kind of an operation, and the name of the call that issued it (CollectiveOptions::call).
struct NamedCall {
  std::string_view call;
  OpKind kind;
  uint64_t number;     // the first sequence number of the operation
  size_t num_numbers;  // the operation has this many consecutive sequence numbers

  // Returns the name of the call, or of the kind if they differ in "_async" only.
  std::string_view name() const;
  // Returns "all_reduce #3", or "split (all_gather #3)" if the call has another name than the kind.
  std::string describe() const { return describe(number); }
  std::string describe(uint64_t at) const;
  // Returns the failure of the group as the caller of this operation sees it: if this operation is
  // the one that failed, the error names its call.
  Error renamed(const Error& error) const;
};

// An operation that was issued to a queue, and keeps the queue alive: the state behind a Work.
class IssuedOperation : public Work::State, public std::enable_shared_from_this<IssuedOperation> {
 public:
  // `call` is CollectiveOptions::call.
  IssuedOperation(std::shared_ptr<ProgressQueue> queue, std::shared_ptr<const void> keep_alive,
                  std::string_view call)
      : queue_(std::move(queue)), keep_alive_(std::move(keep_alive)), call_(call) {}

  void wait(std::optional<Deadline> deadline) final;
  bool is_completed() const final { return is_completed_.load(std::memory_order_acquire); }
  std::optional<Error> error() const final;
  void on_completed(Work::Callback callback) final;
  Deadline deadline_in(Duration timeout) const final;

  // Returns the first number of the operation.
  uint64_t number() const { return number_; }
  // Returns how many consecutive numbers the operation has.
  virtual size_t num_numbers() const { return 1; }
  // Returns the kind of the operation with the first of its numbers.
  virtual OpKind first_kind() const = 0;
  // Returns the owner of the memory that the operation works on; null once the operation has ended.
  const std::shared_ptr<const void>& keep_alive() const { return keep_alive_; }
  // Orders the work that the caller enqueues next on its current stream of the operation's device
  // behind this operation, if the engine has enqueued it.
  virtual Status order_current_stream() const { return {}; }

 private:
  friend class ProgressQueue;
  enum class Stage {
    kPosted,
    kMoving,    // the role's holder has taken the operation out of the queue and runs it
    kEnqueued,  // the engine ends the operation
  };
  struct Call {
    std::shared_ptr<IssuedOperation> operation;
    Work::Callback callback;
  };

  // Returns whether the operation has ended, or a device stream waits for it instead of the caller.
  bool need_not_wait() const {
    return is_completed() || is_ordered_.load(std::memory_order_acquire);
  }
  bool have_callbacks_returned() const {
    return num_callbacks_left_.load(std::memory_order_acquire) == 0;
  }
  // Returns whether wait() may return.
  bool is_settled() const;
  NamedCall named() const { return {call_, first_kind(), number_, num_numbers()}; }
  std::string describe_on_group() const;
  Error wait_timeout() const;

  const std::shared_ptr<ProgressQueue> queue_;
  std::shared_ptr<const void> keep_alive_;
  const std::string_view call_;
  uint64_t number_ = 0;  // the operation's first number, from 1
  Stage stage_ = Stage::kPosted;
  std::list<Call> callbacks_;
  std::atomic<bool> is_ordered_{false};
  Status status_;  // is written before is_completed_ is set, and read after it
  std::atomic<size_t> num_callbacks_left_{0};
  // The exception of the first callback that threw; read when no callback is left.
  std::exception_ptr thrown_;
  std::atomic<bool> is_completed_{false};
};

class ProgressQueue : public std::enable_shared_from_this<ProgressQueue> {
 public:
  virtual ~ProgressQueue() = default;
  ProgressQueue(const ProgressQueue&) = delete;
  ProgressQueue& operator=(const ProgressQueue&) = delete;

  // Returns how many numbers were given so far.
  uint64_t num_issued() const;
  // Returns whether no operation is pending, no callback runs and no thread holds the role.
  bool is_idle() const;
  // Returns whether an operation has not ended.
  bool has_pending() const;
  // Returns whether the calling thread runs a callback, a deleter or an engine from within this
  // queue. If that code called close(), close() would wait for its own caller, or free what it
  // uses.
  bool is_on_this_thread() const;
  // Returns the same as is_on_this_thread() for any queue of the process. A group for which such a
  // thread waits may wait for that thread.
  static bool is_any_on_this_thread();
  // Returns whether a thread for which is_on_this_thread() is true waits for the end of another
  // group.
  bool awaits_other() const { return num_awaiting_other_.load(std::memory_order_seq_cst) > 0; }
  // While an AwaitsOther exists, the calling thread is counted as waiting for the end of another
  // group.
  class AwaitsOther {
   public:
    AwaitsOther() noexcept;
    ~AwaitsOther();
    AwaitsOther(const AwaitsOther&) = delete;
    AwaitsOther& operator=(const AwaitsOther&) = delete;
  };
  // Makes new operations throw `reason` from now on.
  void refuse(const Error& reason);
  // Returns true when the queue is idle, and false when the deadline has passed. Does not take the
  // role: a thread, a waiting caller or an engine ends the operations that are left.
  bool drain(Deadline deadline);
  // Joins the threads. Operations that drain() left end with an error, except those that a waiting
  // caller runs or an engine has enqueued. These end later, and need the objects that the derived
  // queue borrows until the queue is idle. New operations throw from now on.
  void close();

 protected:
  using Handle = std::shared_ptr<IssuedOperation>;
  enum class MovedBy { kCaller, kThread };

  // `log` gets the exceptions of callbacks; if null, they are not logged.
  ProgressQueue(os::System& system, std::string thread_name,
                std::shared_ptr<const ForkGuard> fork_guard, std::shared_ptr<LogSink> log)
      : system_(system),
        fork_guard_(std::move(fork_guard)),
        log_(std::move(log)),
        thread_(system, std::move(thread_name)),
        callback_thread_(system, "cadre-callbacks") {}

  // While an OnThread exists, its thread runs code of the queue that may call code of the program.
  class OnThread {
   public:
    explicit OnThread(const ProgressQueue& queue) noexcept;
    ~OnThread();
    OnThread(const OnThread&) = delete;
    OnThread& operator=(const OnThread&) = delete;

   private:
    friend class ProgressQueue;

    const ProgressQueue& queue_;
    const OnThread* const outer_;  // the mark that this thread had before; null if none
  };

  // Releases the role in its destructor, also after an exception, so that no later call waits for a
  // role that is never released.
  class HeldRole {
   public:
    // REQUIRES: the calling thread has taken the role.
    explicit HeldRole(ProgressQueue& queue) : queue_(queue), on_thread_(queue) {}
    ~HeldRole() { queue_.release_role(); }
    HeldRole(const HeldRole&) = delete;
    HeldRole& operator=(const HeldRole&) = delete;

   private:
    ProgressQueue& queue_;
    const OnThread on_thread_;
  };

  // Numbers the operations in this order. Posts all of them, or throws and posts none. `moved_by`
  // is kCaller if the calling thread waits for them.
  void post(std::span<const Handle> operations, MovedBy moved_by);
  // Waits until the operation has ended, or its engine has enqueued it. Meanwhile the calling
  // thread takes the role when it is free. REQUIRES: the calling thread runs no code of a queue.
  void await_start(const IssuedOperation& operation);
  // If the role is free and no other operation needs it, gives a call its numbers and the role, and
  // returns the first number; else nullopt. The holder must end the call with end_alone(), or pass
  // it to begin_alone() and then to end() or enqueue().
  std::optional<uint64_t> try_begin_alone(size_t num_numbers);

  // REQUIRES for all methods below: the calling thread holds the role.
  void end_alone() { has_ended_alone_ = true; }
  // Gives the operation the number that try_begin_alone() has returned.
  void begin_alone(IssuedOperation& operation, uint64_t number) { operation.number_ = number; }
  // Returns whether advance() must return: operation `until` has ended, or the queue is closed.
  bool is_over(const IssuedOperation* until) const;
  // Returns the oldest posted operation; null if there is none. From now on close() leaves it to
  // the holder. It stays the oldest until it ends, or until start_moving() or enqueue() is called
  // for it.
  Handle begin_oldest();
  void start_moving(IssuedOperation& oldest);
  // Ends the operation when its completion is done.
  void enqueue(IssuedOperation& oldest, const Completion& completion);
  // Ends the operation; does nothing if it has ended already.
  void end(IssuedOperation& operation, Status status);
  void end_all(const Error& error);

 private:
  friend class IssuedOperation;

  // Makes progress on the operations until is_over(until) returns true.
  virtual void advance(const IssuedOperation* until) = 0;
  // Fails with `error` every operation that was passed to start_moving() and is not complete.
  virtual void end_moving(const Error& error) = 0;
  // Called under the lock when an operation was posted or the queue closes: a holder that sleeps in
  // advance() must look at is_over() and begin_oldest() again.
  virtual void wake_holder() = 0;

  // Registers `callback` for the end of the operation. Returns false and does nothing if it has
  // ended.
  bool register_callback(IssuedOperation& operation, Work::Callback& callback);
  // Runs a callback that is due. Returns false if there is none.
  bool run_next_callback();
  void run_callback_thread();
  // Called in the thread that has ended operations, without a lock and without the role.
  void run_callbacks_after_close();
  void end_callback_thread();
  void log_thrown(const IssuedOperation& operation, const std::exception_ptr& thrown) const;
  // REQUIRES: mutex_ is locked.
  void append(std::span<const Handle> operations);
  // REQUIRES: mutex_ is locked.
  void remove_oldest();
  void wait_for(const IssuedOperation& operation, std::optional<Deadline> deadline);
  // REQUIRES: mutex_ is locked.
  bool needs_progress() const { return !posted_.empty() || num_moving_ > 0; }
  // Returns false if another thread has the role or no operation needs it.
  bool try_advance(const IssuedOperation* until);
  void release_role();
  void run_thread();
  // REQUIRES: mutex_ is locked.
  void wake_waiting();

  os::System& system_;
  const std::shared_ptr<const ForkGuard> fork_guard_;  // shared with the group
  const std::shared_ptr<LogSink> log_;                 // shared with the group

  mutable std::mutex mutex_;
  std::deque<Handle> posted_;
  bool is_oldest_begun_ = false;
  size_t num_moving_ = 0;
  uint64_t num_issued_ = 0;
  size_t num_pending_ = 0;
  bool is_role_taken_ = false;
  // The holder of the role sets it when its blocking call has ended; the call is subtracted from
  // num_pending_ when the role is given back.
  bool has_ended_alone_ = false;
  std::atomic<bool> is_stopping_ = false;
  std::optional<Error> refusal_;
  std::list<IssuedOperation::Call> calls_;  // the callbacks of operations that have ended
  size_t num_calling_ = 0;
  mutable std::atomic<int> num_awaiting_other_{0};
  size_t num_registered_ = 0;  // the number of callbacks of operations that have not ended
  bool is_callback_thread_ending_ = false;
  std::vector<os::Waiter*> waiting_;
  IdleThread thread_;
  IdleThread callback_thread_;
};

}  // namespace cadre
