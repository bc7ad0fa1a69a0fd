// A handle to an operation that was issued and may still run.
//
// Threads: any, several at once. Blocking: only wait(). A waiting caller takes over the group's
// progress role and runs the operation itself when no other thread holds it.
// Lifetime: a cheap value over shared state; it keeps alive whatever the issuer attached (tensors).
// Dropping it loses nothing: the operation completes, and its failure is thrown by the group's next
// call. Errors: wait() throws cadre::Error, the same one each time.
// Source: c10d::Work.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/base/export.h"

namespace cadre {

class CADRE_EXPORT [[nodiscard]] Work {
 public:
  // What a handle refers to. comm implements it; group wraps it to finish an operation on its
  // tensors. Same rules as Work's methods; wait(nullopt) is wait().
  class CADRE_EXPORT State {
   public:
    virtual ~State() = default;
    virtual void wait(std::optional<Deadline> deadline) = 0;
    virtual bool is_completed() const = 0;
    virtual std::optional<Error> error() const = 0;
    // On the clock of the operation's group.
    virtual Deadline deadline_in(Duration timeout) const = 0;
  };

  // REQUIRES: state != nullptr.
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Returns when the operation is done, throws its error, or kTimeout at the deadline of this wait
  // (the operation goes on then).
  void wait(Deadline deadline) const { state_->wait(deadline); }
  // The same, `timeout` from now.
  void wait(Duration timeout) const { wait(state_->deadline_in(timeout)); }
  // Until the operation's own deadline.
  void wait() const { state_->wait(std::nullopt); }
  bool is_completed() const { return state_->is_completed(); }
  // A point of time `timeout` from now on the clock of the operation's group: for several waits
  // that share a timeout.
  Deadline deadline_in(Duration timeout) const { return state_->deadline_in(timeout); }
  // The operation's error, if it failed; nullopt while it runs or when it is well.
  std::optional<Error> error() const { return state_->error(); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace cadre
