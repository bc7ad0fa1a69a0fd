// A handle to an operation that was issued and may still run.
//
// Threads: any, several at once. Blocking: only wait(). A waiting caller takes over the group's
// progress role and runs the operation itself when no other thread holds it.
// Lifetime: a cheap value over shared state; it keeps alive whatever the issuer attached (tensors).
// Dropping it loses nothing: the operation completes, and its failure is thrown by the group's next
// call. Errors: wait() throws cadre::Error, the same one each time.
// Source: c10d::Work; on_completed() is the addCallback() of its future.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/base/export.h"

namespace cadre {

class CADRE_EXPORT [[nodiscard]] Work {
 public:
  // Called with the error of the operation, or with nothing.
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
  };

  // REQUIRES: state != nullptr.
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Returns when the operation is done, throws its error, or kTimeout at the deadline of this wait
  // (the operation goes on then). An operation on a device stream is not awaited by the host: it
  // returns when what the caller enqueues next on the stream that the operation was issued with
  // runs after the operation.
  void wait(Deadline deadline) const { state_->wait(deadline); }
  // Until the operation's own deadline.
  void wait() const { state_->wait(std::nullopt); }
  // Whether the operation has ended, on its device too.
  bool is_completed() const { return state_->is_completed(); }
  // The operation's error, if it failed; nullopt while it runs or when it is well.
  std::optional<Error> error() const { return state_->error(); }
  // Calls `callback` once: in this thread, if the operation has ended, else in the thread that ends
  // it, or in another one of this group that makes progress at that time. No lock is held, so the
  // callback may issue operations and wait for them; the operations that are issued already may
  // wait for its return. It must not close or destroy the group, nor outlive what it refers to.
  // What it throws fails the group; called in this thread, it leaves on_completed().
  void on_completed(Callback callback) const { state_->on_completed(std::move(callback)); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace cadre
