// Runs one function as several ranks: as threads, as processes or in the simulator.
//
// Threads: call from one thread; call run_ranks_as_processes from a process with no other thread,
// because fork would not copy the others. Blocking: until all ranks have ended, or until the
// deadline for processes. Lifetime: nothing is left behind: every thread is joined and every
// process is reaped. Errors: what a rank throws is returned as text with its rank. A rank function
// must report a wrong result by throwing (require()), because an EXPECT of a forked child never
// reaches the parent.
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
  // An address, unique to this run, at which rank 0 may listen so that the others find it.
  os::Address rendezvous_address;
  // What the rank returns to the test.
  std::string output;
};

using RankMain = std::function<void(RankContext&)>;

struct RankOutcome {
  std::string failure;  // empty if the rank returned; else what it threw or how it died
  std::string output;
  int signal = 0;  // the signal that ended the process of the rank; 0 for threads
};

struct RanksResult {
  std::vector<RankOutcome> ranks;

  bool ok() const;
  // Returns "rank 1: kTimeout: ..." for each rank that failed; an empty text if none did.
  std::string failures() const;
};

// All ranks are threads of this process and share one native System.
RanksResult run_ranks_as_threads(int world_size, const RankMain& rank_main);

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

// Throws Error(kInternal) with `what` unless the condition holds.
void require(bool condition, std::string_view what);

// Returns a unix address that no other run uses.
os::Address make_rendezvous_address(os::System& system);

// Runs the function and returns what it threw as "kCode: message"; an empty text if it returned.
std::string failure_of(const std::function<void()>& body);

// Runs the function and returns the fields of the error that it threw, without unknown ones:
// "kTimeout culprit=1 operation=all_reduce#2". Returns an empty text if it threw nothing. For tests
// that do not compare messages.
std::string failed_fields_of(const std::function<void()>& body);

}  // namespace cadre::testing
