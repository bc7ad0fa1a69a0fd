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
  // The text that the rank returns to the test.
  std::string output;
};

using RankMain = std::function<void(RankContext&)>;

struct RankOutcome {
  // Empty if the rank function returned; otherwise its error, or how the process died.
  std::string failure;
  std::string output;
  int signal = 0;  // the signal that ended the process of the rank; 0 for threads
};

struct RanksResult {
  std::vector<RankOutcome> ranks;

  bool ok() const;
  // Returns "rank 1: kTimeout: ..." for each rank that failed; an empty text if none did.
  std::string failures() const;
};

// Runs all ranks as threads of this process, which share one native System.
RanksResult run_ranks_as_threads(int world_size, const RankMain& rank_main);

struct ProcessOptions {
  // After this time, ranks that still run are killed, and count as failed.
  Duration time_limit = std::chrono::seconds(30);
  // Called once when all ranks run, with their pids in rank order. The function may kill or stop
  // some of them.
  std::function<void(std::span<const int> pids)> disturb;
};

// Runs each rank as a forked process with its own native System. A rank ends without running
// destructors of the parent's objects or exit handlers.
RanksResult run_ranks_as_processes(int world_size, const RankMain& rank_main,
                                   const ProcessOptions& options = {});

// Throws Error(kInternal) with `what` unless the condition holds.
void require(bool condition, std::string_view what);

// Returns a unix address that no other run uses.
os::Address make_rendezvous_address(os::System& system);

// Runs the function and returns its error as "kCode: message"; an empty text if it returned.
std::string failure_of(const std::function<void()>& body);

// Runs the function and returns the known fields of its error, for example "kTimeout culprit=1
// operation=all_reduce#2"; an empty text if it returned. For tests that do not compare messages.
std::string failed_fields_of(const std::function<void()>& body);

}  // namespace cadre::testing
