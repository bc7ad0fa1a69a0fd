// A job of which one rank kills or stops itself while it trains: runs it, and expects of every
// other rank that training fails there in time, with a code that fits the signal, and that nothing
// is left behind.
//
// Threads: as run_job(). Blocking: run_disturbed(), until all ranks have ended. For tests only.
#pragma once

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/types.h>

#include <chrono>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/victim.h"

namespace cadre::testing {

struct DisturbedJob {
  int world_size = 2;
  int signal = SIGKILL;  // or SIGSTOP

  // Timeout of its groups' operations.
  Duration timeout() const {
    return signal == SIGSTOP ? kStopTimeout : Duration(std::chrono::seconds(30));
  }
};

// What `train` throws, which must fail, and when.
inline FailureReport report_of(RankContext& context, const std::function<void()>& train) {
  FailureReport report;
  report.message = failure_of(train);
  report.raised = context.system.now();
  return report;
}

// Returns the report of its training. On the victim it ends in disturb_self() with `moment_file`.
using DisturbedTraining =
    std::function<FailureReport(RankContext&, const ProcessGroup&, const std::string& moment_file)>;

// One rank of the job.
inline void live_through(RankContext& context, const Membership& membership,
                         const DisturbedJob& job, const DisturbedTraining& train,
                         const std::string& moment_file) {
  at::set_num_threads(1);
  torch::ones({4}, torch::requires_grad()).sum().backward();  // what libtorch starts once
  const Resources before = count_resources();
  int victim_pid = 0;
  {
    const ProcessGroup group(connect(context, membership, {.timeout = job.timeout()}));
    victim_pid = group.communicator().peers()[kVictim].pid;
    const FailureReport report = train(context, group, moment_file);
    context.output = to_text(report);
    require(!report.message.empty(), "no failure");
    group.close();
  }
  if (context.rank == 0 && job.signal == SIGSTOP) ::kill(victim_pid, SIGKILL);
  const std::string left = leftovers_since(before);
  require(left.empty(), left);
}

struct DisturbedOutcome {
  std::string victim;                 // how messages end its name: ", pid 812)"
  std::vector<std::string> messages;  // from the survivors, in the order of their ranks
};

inline DisturbedOutcome run_disturbed(const DisturbedJob& job, const DisturbedTraining& train) {
  const Resources before = count_resources();
  const TemporaryFolder folder;
  const std::string moment_file = folder.file("moment");
  DisturbedOutcome outcome;
  JobOptions options{.world_size = job.world_size};
  options.processes.time_limit = std::chrono::seconds(60);
  options.processes.disturb = [&](std::span<const int> pids) {
    outcome.victim = format(", pid {})", pids[kVictim]);
  };
  const RanksResult result =
      run_job(options, [&](RankContext& context, const Membership& membership) {
        live_through(context, membership, job, train, moment_file);
      });
  EXPECT_EQ(result.ranks[kVictim].signal, SIGKILL);
  const std::string code = job.signal == SIGKILL ? "kPeerLost: " : "kTimeout: ";
  const Duration limit = job.signal == SIGKILL ? kLimit : kStopTimeout + kLimit;
  for (int rank = 0; rank < job.world_size; ++rank) {
    if (rank == kVictim) continue;
    const auto& ended = result.ranks[static_cast<size_t>(rank)];
    EXPECT_EQ(ended.failure, "") << "rank " << rank << ", of all:\n" << result.failures();
    if (!ended.failure.empty()) continue;
    const FailureReport report = parse_report(ended.output);
    EXPECT_THAT(report.message,
                ::testing::AnyOf(::testing::StartsWith(code), ::testing::StartsWith("kAborted: ")));
    const Duration waited = report.raised - read_moment(moment_file);
    EXPECT_LT(waited.count(), limit.count()) << "ns, rank " << rank << ": " << report.message;
    outcome.messages.push_back(report.message);
  }
  EXPECT_EQ(outcome.messages.size(), static_cast<size_t>(job.world_size - 1));
  EXPECT_EQ(leftovers_since(before), "");
  return outcome;
}

// A timeout in the group of one axis of a mesh names the rank that it waits for, and the group in
// which that rank waits: only one rank then has to name the victim.
enum class WaitsIn { kOneGroup, kGroupsOfTwoAxes };

inline void expect_victim_named(const DisturbedOutcome& outcome, WaitsIn groups) {
  int num_naming_it = 0;
  for (const std::string& message : outcome.messages) {
    const bool names_victim = message.find(outcome.victim) != std::string::npos;
    const bool names_waiting_rank =
        groups == WaitsIn::kGroupsOfTwoAxes && message.find("ago, now in ") != std::string::npos;
    EXPECT_TRUE(names_victim || names_waiting_rank)
        << message << "\nof all survivors:" << ::testing::PrintToString(outcome.messages);
    num_naming_it += names_victim ? 1 : 0;
  }
  EXPECT_GE(num_naming_it, 1) << ::testing::PrintToString(outcome.messages);
}

}  // namespace cadre::testing
