// Lets the ranks of a job that a scheduler ends save one step together and leave.
//
// A scheduler announces the end of a job by a signal: Kubernetes and Slurm send SIGTERM, Slurm's
// --signal SIGUSR1 or SIGUSR2. After each step every rank calls must_leave(), which is true on all
// ranks after the same step if a signal has reached one of them. The ranks save that step and
// return what leave() returns, an exit code that asks for another run of the job. `cadre run`
// reports the step, does not count the exit as a failure, and ends with that code.
//
// The signals are handled by counting them, so that they do not end the process. must_leave()
// issues one all_reduce of 4 bytes and waits for that of the call before, which has ended long ago
// if a step computes anything. The all_reduce of the last step is still pending when the program
// has finished its steps. Therefore close() the group, which waits for it; the destructor of a
// group aborts it, and a slower rank gets that as an error.
//
// Threads: one. Make it early in main(), because a signal before that ends the process, but after
// prepare_restart(), which resets the handlers in the workers of a restart. Blocking: must_leave()
// until all ranks have issued the call before; the others never.
// Lifetime: the destructor restores the handlers of before. If a signal has arrived, or leave() was
// called, it does not: the signals then have no effect until the process ends.
// Errors: the constructor throws kInvalidArgument for an exit code or a signal that cannot be used;
// must_leave() throws the failure of the group; a file for the launcher that cannot be written is
// reported on standard error.
// Source: the preemption notice of torch.distributed.checkpoint's users, Orbax's
// reached_preemption(step).
#pragma once

#include <csignal>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/queue/work.h"

namespace cadre {

namespace os {
class PendingSignal;
}  // namespace os

// EX_TEMPFAIL of sysexits.h: run this again.
inline constexpr int kRequeueExitCode = 75;

struct PreemptionOptions {
  std::vector<int> signals = {SIGTERM, SIGUSR1, SIGUSR2};
  int exit_code = kRequeueExitCode;  // 1 to 255; what leave() returns
};

class CADRE_EXPORT Preemption {
 public:
  explicit Preemption(PreemptionOptions options = {});
  ~Preemption();
  Preemption(const Preemption&) = delete;
  Preemption& operator=(const Preemption&) = delete;

  // Collective: all ranks of the group call it at the same place of each step. Returns, equal on
  // all ranks, whether one of them had received a signal at its last call. The first call therefore
  // returns false. After true it does not communicate any more. With another group, for example
  // after rejoin(), it begins anew.
  bool must_leave(Communicator& group);

  // Returns whether this process has received a signal, for programs whose ranks agree in a
  // collective of their own. Does not communicate.
  bool is_requested();

  // Tells the launcher that this rank has saved `step` and leaves, and returns the exit code for
  // main(). Call it when the step is saved.
  int leave(int64_t step);

 private:
  struct Flags;
  void wait_for_agreement();
  void tell_launcher(const std::optional<int64_t>& saved_step);

  const PreemptionOptions options_;
  const std::string file_;  // what the launcher reads; empty without a launcher
  const std::unique_ptr<os::PendingSignal> signals_;
  bool has_told_request_ = false;

  // The all_reduce of the last call of must_leave(), and the group in which it was issued. A later
  // group may have the address of one that was destroyed, but not its shared state.
  std::weak_ptr<const void> group_;
  std::shared_ptr<Flags> flags_;
  std::optional<Work> agreement_;
  bool must_leave_ = false;
};

}  // namespace cadre
