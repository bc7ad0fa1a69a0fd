// Runs one function as several ranks, each in a forked process.
//
// Threads: call it from a process with no other thread, because fork() does not copy other threads.
// Blocking: until all ranks have ended, or until the time limit. Lifetime: every process is reaped.
// Errors: see ranks.h. A rank function must report a wrong result by throwing (require()), because
// a failed EXPECT in a forked child is not reported to the parent.
#pragma once

#include <chrono>
#include <functional>
#include <span>

#include "cadre/core/base/deadline.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {

struct ProcessOptions {
  // Ranks that still run after this time are killed and count as failed.
  Duration time_limit = std::chrono::seconds(30);
  // Called once when all ranks run, with their pids in rank order. A test may kill or stop some of
  // them here.
  std::function<void(std::span<const int> pids)> disturb;
};

// Each rank is a forked process with its own native System. When the rank ends, destructors of the
// parent's objects and exit handlers do not run.
RanksResult run_ranks_as_processes(int world_size, const RankMain& rank_main,
                                   const ProcessOptions& options = {});

}  // namespace cadre::testing
