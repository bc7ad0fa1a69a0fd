// How a process ended.
//
// Threads: plain values. Blocking: never.
#pragma once

#include <optional>

namespace cadre::os {

struct ExitStatus {
  int code = 0;    // what it returned; meaningless when a signal ended it
  int signal = 0;  // that ended it; 0 when it returned
  // False: the child was reaped elsewhere, by the kernel (SIGCHLD is ignored) or by another part of
  // this process, so that neither of the two is known. That is no success.
  bool is_known = true;

  bool is_success() const { return is_known && signal == 0 && code == 0; }
  // As shells report it: 128 + signal for a process that a signal ended; 1 if nothing is known.
  int shell_code() const {
    if (!is_known) return 1;
    return signal != 0 ? 128 + signal : code;
  }
  friend bool operator==(const ExitStatus&, const ExitStatus&) = default;
};

// Reaps a child if it has ended; nullopt while it runs. The program must ask no more afterwards.
std::optional<ExitStatus> try_reap(int pid);

// Waits for the end of a child that is about to end, or was killed, and reaps it.
ExitStatus reap(int pid);

}  // namespace cadre::os
