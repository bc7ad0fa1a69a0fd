// Reads the details of a failure, as a program can: which rank is blamed for it, and which rank
// found it.
//
// Threads: pure functions. Blocking: never.
//
// Threads: pure. Blocking: never.
#pragma once

#include <optional>

#include "simulated_job.h"

namespace cadre::testing {

struct Verdict {
  bool is_connecting = false;  // whether the reporter had not joined the group yet
  int reporter = -1;           // the rank that found the failure first
  std::optional<int> culprit;  // the blamed rank; the lowest one if several ranks did not connect
};

// REQUIRES: the rank has failed.
Verdict verdict_of(const JobOutcome& outcome, int rank);

}  // namespace cadre::testing
