// Reads the details of an Error, as a program can: which rank it names as the culprit, and which
// rank detected the failure.
//
// Threads: pure functions. Blocking: never.
#pragma once

#include <optional>

#include "simulated_job.h"

namespace cadre::testing {

struct Verdict {
  bool is_connecting = false;  // whether the reporting rank had not joined the group yet
  int reporter = -1;           // the rank that detected the failure first
  std::optional<int> culprit;  // the blamed rank; the lowest one if several ranks did not connect
};

// REQUIRES: the rank has failed.
Verdict verdict_of(const JobOutcome& outcome, int rank);

}  // namespace cadre::testing
