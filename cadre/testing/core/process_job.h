// Runs a job for tests with real processes: the ranks, and one more process that serves their
// store, so that any rank may be killed. The store process ends when the last rank has ended.
//
// Threads: call from a process with no other thread. Blocking: until all have ended.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "cadre/core/comm/communicator.h"
#include "cadre/core/rendezvous/rendezvous.h"
#include "cadre/testing/core/process_ranks.h"

namespace cadre::testing {

struct JobOptions {
  int world_size = 2;
  ProcessOptions processes = {};
};

using JobMain = std::function<void(RankContext&, const Membership&)>;

// Returns the outcomes of the ranks, without that of the store's process.
RanksResult run_job(const JobOptions& options, const JobMain& rank_main);

std::unique_ptr<Communicator> connect(RankContext& context, const Membership& membership,
                                      const CommunicatorOptions& options,
                                      Duration budget = std::chrono::seconds(20));

// Sleeps.
void nap(os::System& system, Duration duration);

// The report of a rank that survived a failure. Its times are on the clock that all processes of a
// host share.
struct FailureReport {
  TimePoint raised;     // when the rank got the error
  TimePoint disturbed;  // when this rank sent the signal, if it is the rank that did
  std::string message;  // "kCode: message"
};
std::string to_text(const FailureReport& report);
FailureReport parse_report(const std::string& text);

// Replaces pids, host names, durations, operation numbers and phases in a message by fixed words.
std::string mask(std::string text);

// Shortens "rank 1 of group "world" (world rank 2, " to "rank 1 (", as in a message of a group of
// all ranks. first_world_rank is the world rank of the group's rank 0; those of its other ranks
// follow it. A different world rank is not removed.
std::string without_world_ranks(std::string text, int first_world_rank);

}  // namespace cadre::testing
