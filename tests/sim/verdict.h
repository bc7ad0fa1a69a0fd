// Which rank a failure blames, and which rank found it: what a program reads from its details.
//
// Threads: pure. Blocking: never.
#pragma once

#include <optional>

#include "simulated_job.h"

namespace cadre::testing {

struct Verdict {
  bool is_connecting = false;  // the reporter had not joined the group yet
  int reporter = -1;           // the rank that found it first
  std::optional<int> culprit;  // the lowest one, if several did not connect
};

// REQUIRES: the rank has failed.
Verdict verdict_of(const JobOutcome& outcome, int rank);

}  // namespace cadre::testing
