// Runs one function as several ranks: as threads, as processes or in the simulator.
//
// Threads: call from one thread; run_ranks_as_processes from a process with no other thread, which
// fork would not copy. Blocking: until all ranks have ended, or the deadline for processes.
// Lifetime: nothing is left behind: every thread is joined and every process reaped.
// Errors: whatever a rank throws comes back as text with its rank; a rank function reports a wrong
// result by throwing (require()), because an EXPECT of a forked child never reaches the parent.
#pragma once

#include <chrono>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/types.h"
#include "cadre/core/os/system.h"

namespace cadre::testing {

struct RankContext {
  os::System& system;
  Rank rank;
  int world_size = 1;
  // Where rank 0 may listen so that the others find it: a name of this run alone.
  os::Address rendezvous_address;
  // What the rank hands back to the test.
  std::string output;
};

using RankMain = std::function<void(RankContext&)>;

struct RankOutcome {
  std::string failure;  // empty when the rank returned; else what it threw or how it died
  std::string output;
  int signal = 0;  // that ended the process of the rank; 0 for threads
};

struct RanksResult {
  std::vector<RankOutcome> ranks;

  bool ok() const;
  // "rank 1: kTimeout: ..." for each rank that failed; empty when none did.
  std::string failures() const;
};

// All ranks are threads of this process and share one native System.
RanksResult run_ranks_as_threads(int world_size, const RankMain& rank_main);

struct ProcessOptions {
  // Ranks that have not ended by then are killed and fail.
  Duration time_limit = std::chrono::seconds(30);
  // Called once when all ranks run, with their pids in rank order: to kill or stop some of them.
  std::function<void(std::span<const int> pids)> disturb;
};

// Each rank is a forked process with a native System of its own. A rank ends without running
// destructors of the parent's objects or exit handlers.
RanksResult run_ranks_as_processes(int world_size, const RankMain& rank_main,
                                   const ProcessOptions& options = {});

// Throws Error(kInternal) with `what` unless the condition holds.
void require(bool condition, std::string_view what);

// A unix address that no other run uses.
os::Address make_rendezvous_address(os::System& system);

// Runs the function and returns what it threw as "kCode: message"; empty when it returned.
std::string failure_of(const std::function<void()>& body);

// The fields of the error that the function threw, for tests that do not compare messages:
// "kTimeout culprit=1 operation=all_reduce#2", without what is unknown. Empty when it returned.
std::string failed_fields_of(const std::function<void()>& body);

}  // namespace cadre::testing
