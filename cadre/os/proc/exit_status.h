// How a process ended.
//
// Threads: plain values. Blocking: never.
#pragma once

namespace cadre::os {

struct ExitStatus {
  int code = 0;    // what it returned; meaningless when a signal ended it
  int signal = 0;  // that ended it; 0 when it returned

  bool is_success() const { return signal == 0 && code == 0; }
  // As shells report it: 128 + signal for a process that a signal ended.
  int shell_code() const { return signal != 0 ? 128 + signal : code; }
  friend bool operator==(const ExitStatus&, const ExitStatus&) = default;
};

}  // namespace cadre::os
