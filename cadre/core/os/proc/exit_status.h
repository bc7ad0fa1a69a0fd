// How a process ended.
//
// Threads: plain values. Blocking: never.
#pragma once

#include <optional>

namespace cadre::os {

struct ExitStatus {
  int code = 0;    // the exit code; meaningless when a signal ended the process
  int signal = 0;  // the signal that ended the process; 0 when it returned
  // False if another part of this process, or the kernel (when SIGCHLD is ignored), reaped the
  // child, so that code and signal are unknown. Such an exit does not count as a success.
  bool is_known = true;

  bool is_success() const { return is_known && signal == 0 && code == 0; }
  // Returns the code that shells report: 128 + signal for a process that a signal ended; 1 if the
  // status is unknown.
  int shell_code() const {
    if (!is_known) return 1;
    return signal != 0 ? 128 + signal : code;
  }
  friend bool operator==(const ExitStatus&, const ExitStatus&) = default;
};

// Reaps a child if it has ended; returns nullopt while it runs. Do not call it again for a child
// that was reaped.
std::optional<ExitStatus> try_reap(int pid);

// Reaps a child that is about to end or was killed; waits for its end.
ExitStatus reap(int pid);

}  // namespace cadre::os
