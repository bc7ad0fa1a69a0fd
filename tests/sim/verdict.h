// Reads from the details of a failure which rank it blames and which rank found it, as a program
// can.
//
// Threads: pure. Blocking: never.
#pragma once

#include <optional>

#include "simulated_job.h"

namespace cadre::testing {

struct Verdict {
  bool is_connecting = false;  // the reporter had not yet joined the group
  int reporter = -1;           // the rank that found the failure first
  std::optional<int> culprit;  // the lowest rank if several did not connect
};

// REQUIRES: the rank has failed.
Verdict verdict_of(const JobOutcome& outcome, int rank);

}  // namespace cadre::testing
