// A handle to an operation that was issued and may still run, and the options of its issue.
//
// Threads: any, several at once. Blocking: only wait(). A waiting caller takes over the group's
// progress role and runs the operation itself when no other thread holds it.
// Lifetime: a cheap value over shared state; it keeps alive whatever the issuer attached (tensors).
// Dropping it loses nothing: the operation completes, and its failure is thrown by the group's next
// call. Errors: wait() throws cadre::Error, the same one each time, or what a callback threw.
// Source: c10d::Work; on_completed() is the addCallback() of its future.
// Guide: docs/guide/reference/groups-and-messages.md.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre {

// With what an operation is issued, a message as well as a collective.
struct CollectiveOptions {
  // Default: the group's timeout, from the start of the operation: not from its issue, since other
  // operations may have to end before.
  std::optional<Deadline> deadline;
  // Released when the operation is done, by the thread that ends it and without a lock held. What
  // its deleter does may use the group, but must not wait for it. It may destroy the last handle of
  // the group, which then ends in another thread soon after (Communicator::~Communicator).
  std::shared_ptr<const void> keep_alive;
  // The call that the program made, where the operation is only a part of it or has another name:
  // "split", "all_gather_async". Errors of the operation name it. Static text.
  std::string_view call = {};
};

class CADRE_EXPORT [[nodiscard]] Work {
 public:
  // Called with the error of the operation, or with nullopt.
  using Callback = std::function<void(const std::optional<Error>&)>;

  // The state behind a handle, which comm implements. Same rules as Work's methods; wait(nullopt)
  // is wait().
  class CADRE_EXPORT State {
   public:
    virtual ~State() = default;
    virtual void wait(std::optional<Deadline> deadline) = 0;
    virtual bool is_completed() const = 0;
    virtual std::optional<Error> error() const = 0;
    virtual void on_completed(Callback callback) = 0;
    // On the clock of the operation's group.
    virtual Deadline deadline_in(Duration timeout) const = 0;
  };

  // A null state is that of a handle that was moved from: every method throws kInvalidArgument.
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Returns when the operation has ended and its callbacks have returned; throws the error of the
  // operation, or else the exception that left the first of those callbacks. At the deadline of
  // this wait it throws kTimeout, with the operation and the group in its details: the operation
  // goes on then, the group stays usable, and the caller may wait again or abort() the group. A
  // callback that waits awaits only the operation. An operation on a device stream is not awaited
  // by the host: it returns when what the caller enqueues next on the stream that the operation was
  // issued with runs after the operation.
  void wait(Deadline deadline) const { state().wait(deadline); }
  // The same, `timeout` from now.
  void wait(Duration timeout) const { wait(state().deadline_in(timeout)); }
  // Until the operation's own deadline.
  void wait() const { state().wait(std::nullopt); }
  // Whether the operation has ended, on its device too.
  bool is_completed() const { return state().is_completed(); }
  // A point of time `timeout` from now on the clock of the operation's group: for several waits
  // that share a timeout.
  Deadline deadline_in(Duration timeout) const { return state().deadline_in(timeout); }
  // The operation's error, if it failed; nullopt while it runs or when it is well.
  std::optional<Error> error() const { return state().error(); }
  // Calls `callback` once: in this thread, if the operation has ended, else in a thread of the
  // group that runs callbacks only ("cadre-callbacks"), one after the other in the order in which
  // their operations end; messages have such a thread beside that of the collectives. It may issue
  // operations and wait for them; the group makes progress meanwhile, and the next callbacks wait
  // for its return. It cannot close the group, which throws kInvalidArgument there. If it destroys
  // the last handle of a group, that ends in another thread soon after. It must not outlive what
  // it refers to. What it throws is logged and thrown by wait(), and the group stays usable; called
  // in this thread, it leaves on_completed(). Throws kUnavailable, and will not call `callback`,
  // when the thread cannot be started.
  void on_completed(Callback callback) const { state().on_completed(std::move(callback)); }

 private:
  State& state() const {
    if (state_ == nullptr) refuse();
    return *state_;
  }
  [[noreturn]] static void refuse();

  std::shared_ptr<State> state_;
};

}  // namespace cadre
