// Runs one function as several ranks, each a forked process.
//
// Threads: call from a process with no other thread, because fork would not copy the others.
// Blocking: until all ranks have ended, or until the time limit. Lifetime: every process is reaped.
// Errors: see ranks.h. A rank function must report a wrong result by throwing (require()), because
// an EXPECT of a forked child never reaches the parent.
#pragma once

#include <chrono>
#include <functional>
#include <span>

#include "cadre/core/base/deadline.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {

struct ProcessOptions {
  // Ranks that have not ended after this time are killed and fail.
  Duration time_limit = std::chrono::seconds(30);
  // Called once when all ranks run, with their pids in rank order. It may kill or stop some of
  // them.
  std::function<void(std::span<const int> pids)> disturb;
};

// Each rank is a forked process with its own native System. A rank ends without running destructors
// of the parent's objects or exit handlers.
RanksResult run_ranks_as_processes(int world_size, const RankMain& rank_main,
                                   const ProcessOptions& options = {});

}  // namespace cadre::testing
