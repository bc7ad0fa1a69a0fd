// Signals as objects to poll (signalfd) or to query, instead of interruptions.
//
// Threads: use each object from one thread. Make a SignalListener before the process starts other
// threads, which then inherit the blocked mask; a PendingSignal at any time. Blocking: never.
// Lifetime: the destructor of SignalListener restores the mask of its thread, which must be the
// thread that made the object; the same holds for PendingSignal and the signals that it unblocked.
// Errors: the constructor of SignalListener throws Error(kUnavailable) when no descriptor is left;
// that of PendingSignal throws Error(kInvalidArgument) for a signal that cannot be counted.
#pragma once

#include <signal.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/socket.h"

namespace cadre::os {

// Signals as an object to poll. A signal that has arrived, but was not taken by try_next(), takes
// effect when the object is destroyed.
class SignalListener final : public Pollable {
 public:
  // Blocks and receives the signals that signals_to_take(signals) returns.
  explicit SignalListener(std::span<const int> signals);
  ~SignalListener() override;

  // Returns the next signal that arrived; nullopt if there is none.
  std::optional<int> try_next();

  int poll_handle() const override { return fd_.get(); }

 private:
  sigset_t previous_mask_;
  Fd fd_;
};

// Handles signals by counting them, and lets the program query whether one has arrived. Signals
// that arrive while the object lives have no other effect, except that system calls which the
// kernel does not restart end with EINTR. A SIGHUP that the process ignores (nohup) stays ignored.
// The signals are unblocked in the thread that makes the object, because a blocked signal, which a
// process may inherit, would not reach the handler. Objects for the same signal are destroyed in
// reverse order.
class CADRE_EXPORT PendingSignal {
 public:
  explicit PendingSignal(std::span<const int> signals);
  // Restores the handlers, and blocks the signals that were blocked.
  ~PendingSignal();
  PendingSignal(const PendingSignal&) = delete;
  PendingSignal& operator=(const PendingSignal&) = delete;

  // Returns whether one of the signals has arrived since this object was made. Once it has returned
  // true, it always does.
  bool has_arrived() const;
  // Makes the signals have no effect until the process ends, also after the destructor.
  void stay() { stays_ = true; }

 private:
  struct Watched {
    int number = 0;
    uint32_t num_before = 0;  // how often it had arrived when this object was made
    struct sigaction previous = {};
  };
  std::vector<Watched> watched_;
  sigset_t previous_mask_;
  bool stays_ = false;
};

// Returns `signals`, but without SIGHUP and SIGTSTP if this process ignores them: a process that
// nohup started should survive the hangup, and a shell without job control cannot continue a
// process that Ctrl-Z stopped. A signal that is blocked would be queued although it is ignored.
CADRE_EXPORT sigset_t signals_to_take(std::span<const int> signals);

// Returns "SIGTERM", or "signal 63" for a signal without a name.
std::string signal_name(int signal);

}  // namespace cadre::os
