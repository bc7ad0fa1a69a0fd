// Runs a job in which one rank, the victim, kills or stops itself while it trains. Training must
// then fail on every other rank (the survivors) within a limit, and no process, thread or file may
// be leaked.
//
// Threads: those of run_job(). Blocking: run_disturbed(), until all ranks have ended. For tests
// only.
#pragma once

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/types.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::testing {

inline constexpr int kVictim = 1;
inline constexpr Duration kStopTimeout = std::chrono::seconds(2);
// The time within which the survivors must fail: after the signal, or, if SIGSTOP has only stopped
// the victim, after the timeout of the operation.
inline constexpr Duration kLimit = std::chrono::seconds(2);

struct DisturbedJob {
  int world_size = 2;
  int signal =
      SIGKILL;  // SIGSTOP only stops the victim; 0 means that it leaves the group in an orderly way
  TransportChoice transport = TransportChoice::kAuto;

  // Returns the timeout of the operations of the job's groups.
  Duration timeout() const {
    return signal == SIGSTOP ? kStopTimeout : Duration(std::chrono::seconds(30));
  }
};

// The time at which the victim killed or stopped itself, and the pid of its process.
struct Moment {
  TimePoint time;
  int pid = 0;
};

inline Moment read_moment(const std::string& moment_file) {
  Moment moment;
  std::ifstream(moment_file) >> moment.time.ns >> moment.pid;
  return moment;
}

// One rank of a disturbed job.
struct DisturbedRank {
  RankContext& context;
  const Membership& membership;
  const DisturbedJob& job;
  std::string moment_file;

  bool is_victim() const { return context.rank == kVictim; }
  CommunicatorOptions options() const {
    CommunicatorOptions options;
    options.transport = job.transport;
    options.timeout = job.timeout();
    return options;
  }
  // The victim kills or stops itself.
  [[noreturn]] void disturb_self() const {
    std::ofstream(moment_file) << context.system.now().ns << " " << ::getpid();
    ::raise(job.signal);
    // A victim that is continued after SIGSTOP must not continue its training.
    throw Error(ErrorCode::kInternal, "the victim has continued after its signal");
  }
  // Runs `train`, which must throw, and returns the error and its time. Also calls `check` with the
  // error.
  FailureReport report_of(const std::function<void()>& train,
                          const std::function<void(const Error&)>& check = nullptr) const {
    FailureReport report;
    try {
      train();
    } catch (const Error& error) {
      report.raised = context.system.now();
      report.message = format("{}: {}", to_string(error.code()), error.message());
      if (check) check(error);
    }
    return report;
  }
};

// The function that each rank runs. On every survivor it must return the report of the failure that
// this rank saw. On the victim it ends in disturb_self(), which kills or stops the process. If the
// job's `signal` is 0, the victim instead leaves the group in an orderly way, and the report that
// it returns is ignored.
using DisturbedBody = std::function<FailureReport(DisturbedRank&)>;

// Returns a DisturbedBody that calls a function with a group of all ranks.
inline DisturbedBody on_group(
    std::function<FailureReport(DisturbedRank&, const ProcessGroup&)> train) {
  return [train = std::move(train)](DisturbedRank& rank) {
    const ProcessGroup group(connect(rank.context, rank.membership, rank.options()));
    const FailureReport report = train(rank, group);
    group.close();
    return report;
  };
}

inline void live_through(DisturbedRank& rank, const DisturbedBody& body) {
  at::set_num_threads(1);
  // Makes libtorch start its threads before count_resources(), so that they do not count as leaked.
  torch::ones({4}, torch::requires_grad()).sum().backward();
  const Resources before = count_resources();
  const FailureReport report = body(rank);
  rank.context.output = to_text(report);
  if (rank.is_victim()) return;
  require(!report.message.empty(), "no failure");
  if (rank.context.rank == 0 && rank.job.signal == SIGSTOP) {
    ::kill(read_moment(rank.moment_file).pid, SIGKILL);
  }
  const std::string left = leftovers_since(before);
  require(left.empty(), left);
}

struct DisturbedOutcome {
  std::string victim;    // how errors name the victim, such as ", pid 812)"
  std::string farewell;  // the message of the error on a victim that left in an orderly way
  std::map<int, std::string> messages;  // messages of the survivors, by rank
};

inline DisturbedOutcome run_disturbed(const DisturbedJob& job, const DisturbedBody& body) {
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
        DisturbedRank rank{context, membership, job, moment_file};
        live_through(rank, body);
      });
  const RankOutcome& victim = result.ranks[kVictim];
  EXPECT_EQ(victim.signal, job.signal == 0 ? 0 : SIGKILL);
  if (job.signal == 0) {
    EXPECT_EQ(victim.failure, "");
    if (victim.failure.empty()) outcome.farewell = parse_report(victim.output).message;
  }
  const Duration limit = job.signal == SIGSTOP ? kStopTimeout + kLimit : kLimit;
  for (int rank = 0; rank < job.world_size; ++rank) {
    if (rank == kVictim) continue;
    const RankOutcome& ended = result.ranks[static_cast<size_t>(rank)];
    EXPECT_EQ(ended.failure, "") << "rank " << rank << ", of all:\n" << result.failures();
    if (!ended.failure.empty()) continue;
    const FailureReport report = parse_report(ended.output);
    outcome.messages[rank] = report.message;
    if (job.signal == 0) continue;
    const Duration waited = report.raised - read_moment(moment_file).time;
    EXPECT_GE(waited.count(), 0) << "ns, rank " << rank << ": " << report.message;
    EXPECT_LT(waited.count(), limit.count()) << "ns, rank " << rank << ": " << report.message;
  }
  EXPECT_EQ(outcome.messages.size(), static_cast<size_t>(job.world_size - 1));
  EXPECT_EQ(leftovers_since(before), "");
  return outcome;
}

// Whether the ranks wait in one group or in the groups of several mesh axes. In the second case a
// timeout names the rank for which its own group waits. That rank may be a survivor that waits in
// another group, so only one error has to name the victim.
enum class WaitsIn { kOneGroup, kGroupsOfAxes };

// Checks that the survivors' error codes fit the signal, and that their messages name the victim.
inline void expect_victim_named(const DisturbedJob& job, const DisturbedOutcome& outcome,
                                WaitsIn groups) {
  const std::string code = job.signal == SIGSTOP ? "kTimeout: " : "kPeerLost: ";
  int num_naming_it = 0;
  for (const auto& [rank, message] : outcome.messages) {
    EXPECT_THAT(message,
                ::testing::AnyOf(::testing::StartsWith(code), ::testing::StartsWith("kAborted: ")))
        << "rank " << rank;
    const bool names_victim = message.find(outcome.victim) != std::string::npos;
    const bool names_waiting_rank = job.signal == SIGSTOP && groups == WaitsIn::kGroupsOfAxes &&
                                    message.find("ago, now in ") != std::string::npos;
    EXPECT_TRUE(names_victim || names_waiting_rank)
        << message << "\nof all survivors:" << ::testing::PrintToString(outcome.messages);
    num_naming_it += names_victim ? 1 : 0;
  }
  EXPECT_GE(num_naming_it, 1) << ::testing::PrintToString(outcome.messages);
}

}  // namespace cadre::testing
