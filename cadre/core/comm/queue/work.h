// A handle to an operation that was issued and may still run, and the options of its issue.
//
// Threads: any, several at once. Blocking: only wait(). A waiting caller takes over the group's
// progress role and runs the operation itself when no other thread holds it.
// Lifetime: a cheap value over shared state, which keeps alive what the issuer attached (tensors).
// An operation whose handle is dropped still completes, and the group's next call throws its
// failure. Errors: wait() throws cadre::Error, the same one each time, or what a callback threw.
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

// The options with which an operation is issued, a message as well as a collective.
struct CollectiveOptions {
  // The deadline of the operation. If empty, the group's timeout counts from the start of the
  // operation and not from its issue, since other operations may have to end before.
  std::optional<Deadline> deadline = {};
  // The same limit as a duration from the call on, in place of a deadline; positive.
  std::optional<Duration> timeout = {};
  // An owner of the memory that the operation uses. It is released when the operation is done, by
  // the thread that ends it, without a lock held. The deleter may use the group, but must not wait
  // for it. It may destroy the last handle of the group, which then ends in another thread soon
  // after (Communicator::~Communicator).
  std::shared_ptr<const void> keep_alive = {};
  // The call that the program made, if the operation is only a part of it or has another name:
  // "split", "all_gather_async". Errors of the operation name this call. Static text.
  std::string_view call = {};
};

class CADRE_EXPORT [[nodiscard]] Work {
 public:
  // Called with the error of the operation; nullopt if the operation succeeded.
  using Callback = std::function<void(const std::optional<Error>&)>;

  // The state behind a handle, which comm implements. Its methods follow the rules of Work's
  // methods; wait(nullopt) is wait().
  class CADRE_EXPORT State {
   public:
    virtual ~State() = default;
    virtual void wait(std::optional<Deadline> deadline) = 0;
    virtual bool is_completed() const = 0;
    virtual std::optional<Error> error() const = 0;
    virtual void on_completed(Callback callback) = 0;
    // Returns the point in time `timeout` from now on the clock of the operation's group.
    virtual Deadline deadline_in(Duration timeout) const = 0;
  };

  // A null state is that of a handle that was moved from: every method throws kInvalidArgument.
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Returns when the operation has ended and its callbacks have returned. Throws the error of the
  // operation, or else the exception of the first callback that threw. At the deadline of this wait
  // throws kTimeout, with the operation and the group in its details. The operation then goes on,
  // the group stays usable, and the caller may wait again or abort() the group. In a callback,
  // wait() waits for the operation but not for its callbacks. For an operation that an engine has
  // enqueued on a device, wait() does not block the host: it orders the work that the caller
  // enqueues next on its current stream of the device behind the operation, and returns.
  void wait(Deadline deadline) const { state().wait(deadline); }
  // Does the same, with a deadline `timeout` from now.
  void wait(Duration timeout) const { wait(state().deadline_in(timeout)); }
  // Does the same, with the operation's own deadline.
  void wait() const { state().wait(std::nullopt); }
  // Returns whether the operation has ended, on its device too.
  bool is_completed() const { return state().is_completed(); }
  // Returns the point in time `timeout` from now on the clock of the operation's group, for several
  // waits that share a timeout.
  Deadline deadline_in(Duration timeout) const { return state().deadline_in(timeout); }
  // Returns the operation's error, if it failed; nullopt while it runs or if it succeeded.
  std::optional<Error> error() const { return state().error(); }
  // Calls `callback` once: in this thread if the operation has ended, else in a thread of the group
  // that only runs callbacks ("cadre-callbacks"), one after the other in the order in which their
  // operations end. Messages have such a thread of their own. The callback may issue operations and
  // wait for them; the group makes progress meanwhile, and the next callbacks wait for its return.
  // It cannot close the group: close() throws kInvalidArgument there. If it destroys the last
  // handle of a group, the group ends in another thread soon after. The callback must not outlive
  // what it refers to. An exception of the callback is logged and thrown by wait(), and the group
  // stays usable; in this thread, the exception leaves on_completed(). Throws kUnavailable, and
  // will not call `callback`, if the thread cannot be started.
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
