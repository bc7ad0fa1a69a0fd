// Whom a failure blames, read from its text: what a user would take from it.
//
// Threads: pure. Blocking: never.
#pragma once

#include <vector>

#include "simulated_job.h"

namespace cadre::testing {

struct Verdict {
  bool is_connecting = false;  // the reporter had not joined the group yet
  int reporter = -1;           // the rank that saw it first
  std::vector<int> named;      // of an operation exactly one; who was missing while connecting
};

// REQUIRES: report.failure.
Verdict verdict_of(const RankReport& report, int rank);

}  // namespace cadre::testing
