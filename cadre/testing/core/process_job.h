// Runs a job with real processes for tests: the ranks, and one more process that serves their
// store, so that a test may kill any rank. The store's process ends when the last rank has ended.
//
// Threads: call it from a process with no other thread. Blocking: until all processes have ended.
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

// Runs the job and returns the outcomes of the ranks, without that of the store's process.
RanksResult run_job(const JobOptions& options, const JobMain& rank_main);

std::unique_ptr<Communicator> connect(RankContext& context, const Membership& membership,
                                      const CommunicatorOptions& options,
                                      Duration budget = std::chrono::seconds(20));

// Sleeps for the given time.
void nap(os::System& system, Duration duration);

// What a rank that survived a failure reports. The times are of the monotonic clock, which all
// processes of a host share.
struct FailureReport {
  TimePoint raised;     // when the rank got the error
  TimePoint disturbed;  // when this rank sent the signal that caused the failure, if it did
  std::string message;  // "kCode: message"
};
std::string to_text(const FailureReport& report);
FailureReport parse_report(const std::string& text);

// Replaces pids, host names, durations, operation numbers and phases of operations in a message by
// fixed words, so that tests can compare it.
std::string mask(std::string text);

// Shortens "rank 1 of group "world" (world rank 2, " to "rank 1 (", the form in messages of a group
// of all ranks. first_world_rank is the world rank of the group's rank 0; the world ranks of the
// others must follow it. If a world rank is a different one, it is not removed.
std::string without_world_ranks(std::string text, int first_world_rank);

}  // namespace cadre::testing
