// A rank of a training run is killed or stopped, by its own hand, between backward and the next
// step: while the ranks add up their losses, in the evaluation, and where they meet for a snapshot.
// Every survivor's run() raises the named failure in time. Nothing is left.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/group_fakes.h"
#include "cadre/testing/torch/victim.h"
#include "cadre/train/trainer/trainer.h"

namespace cadre::train {
namespace {

using std::chrono::seconds;
using testing::FakeGroup;
using testing::GroupCall;
using testing::kLimit;
using testing::kStopTimeout;
using testing::kVictim;
using testing::mask;
using testing::RankContext;
using testing::require;
using torch::Tensor;

constexpr int kWorldSize = 3;

enum class TrainerMoment { kLossSum, kEvaluation, kSnapshot };

struct TrainerCase {
  TrainerMoment moment;
  int signal;
};

std::string name_of_trainer_case(const ::testing::TestParamInfo<TrainerCase>& info) {
  const char* moment = info.param.moment == TrainerMoment::kLossSum      ? "loss_sum"
                       : info.param.moment == TrainerMoment::kEvaluation ? "evaluation"
                                                                         : "snapshot";
  return format("{}_{}", info.param.signal == SIGKILL ? "kill" : "stop", moment);
}

Config config_in(const std::string& folder) {
  Config config;
  config.model = {.kind = "mlp", .layers = 1, .width = 16};
  config.data = {.kind = "synthetic", .samples = 300};
  config.schedule.warmup_steps = 0;
  config.run = {.folder = folder,
                .steps = 8,
                .global_batch_size = 12,
                .evaluate_every = 2,
                .snapshot_every = 3};
  return config;
}

// In what run() itself asks for, apart from gradients: `is_running` says when. The sums are those
// of step 1, step 2, the evaluation after step 2, and so on.
void disturb_self_at(TrainerMoment moment, const FakeGroup& group, const bool& is_running,
                     const std::function<void()>& act) {
  const int due = moment == TrainerMoment::kLossSum ? 2 : 3;
  group.on_call = [=, &is_running, num_sums = 0](GroupCall& call) mutable {
    if (!is_running) {
      call.pass_on();
      return;
    }
    if (moment == TrainerMoment::kSnapshot) {
      if (call.kind == OpKind::kAllGather && call.input.scalar_type() == torch::kByte) act();
    } else if (call.kind == OpKind::kAllReduce && call.input.scalar_type() == torch::kFloat64) {
      if (++num_sums == due) act();
    }
    call.pass_on();
  };
}

void train_until_it_fails(RankContext& context, const Membership& membership,
                          const TrainerCase& test, const testing::TemporaryFolder& folder) {
  at::set_num_threads(1);
  const auto limit = test.signal == SIGSTOP ? kStopTimeout : Duration(seconds(30));
  const FakeGroup fake(testing::connect(context, membership, {.timeout = limit}));
  const ProcessGroup group = fake.group();
  const int victim_pid = group.communicator().peers()[kVictim].pid;
  bool is_running = false;
  if (context.rank == kVictim) {
    disturb_self_at(test.moment, fake, is_running,
                    [&] { testing::disturb_self(context, test.signal, folder.file("moment")); });
  }
  Trainer trainer(config_in(folder.path()), {.world = group,
                                             .system = context.system,
                                             .time_in_communication = [] { return Duration(0); },
                                             .stop_is_requested = [] { return false; },
                                             .print = [](std::string_view) {}});
  testing::FailureReport report;
  is_running = true;
  report.message = testing::failure_of([&] { trainer.run(); });
  report.raised = context.system.now();
  context.output = testing::to_text(report);
  group.close();
  if (context.rank == 0 && test.signal == SIGSTOP) ::kill(victim_pid, SIGKILL);
}

// Every message that a survivor may throw, masked: the operation during or after which it failed,
// and for a timeout the rank that reported it first.
std::vector<std::string> trainer_golden_texts(const TrainerCase& test, int rank) {
  const std::string victim = "rank 1 (HOST, pid N)";
  const std::string self = format("rank {} (HOST, pid N)", rank);
  const std::string rebuild = ". Remedy: rebuild the group.";
  // The operation in which the victim acts.
  const std::string seen =
      format("last seen in {} #N, PHASE, N s ago",
             test.moment == TrainerMoment::kSnapshot ? "all_gather" : "all_reduce");
  std::vector<std::string> texts;
  // What this rank's own call is named, and the operation that it runs.
  const std::vector<std::pair<std::string, std::string>> operations = {
      {"all_reduce #N", "all_reduce"},
      {"cadre train (all_gather #N)", "all_gather"},
      {"all_gather_into_tensor (all_gather #N)", "all_gather"}};
  for (const auto& [call, operation] : operations) {
    const std::string cause =
        format("\n  {} is gone: its connection ended, {}{}", victim, seen, rebuild);
    const auto timed_out = [&](const std::string& name, int who) {
      return format(
          "{} on group \"world\" timed out after N s on rank {} (HOST, pid N)\n  waiting for {}, "
          "which does not answer: {}{}",
          name, who, victim, seen, rebuild);
    };
    if (test.signal == SIGKILL) {
      texts.push_back(
          format("kPeerLost: {} on group \"world\" failed after N s on {}{}", call, self, cause));
      texts.push_back(
          format("kPeerLost: group \"world\" failed on {} after {} #N{}", self, operation, cause));
      continue;
    }
    texts.push_back("kTimeout: " + timed_out(call, rank));
    texts.push_back(format(
        "kAborted: {} on group \"world\" was aborted after N s on {}\n  first failure: {} Remedy: "
        "look at the first failure, then rebuild the group.",
        call, self, timed_out(operation + " #N", 2 - rank)));
  }
  return texts;
}

class TrainerFailureTest : public ::testing::TestWithParam<TrainerCase> {};

TEST_P(TrainerFailureTest, EverySurvivorsRunNamesTheCulprit) {
  const TrainerCase& test = GetParam();
  const testing::Resources before = testing::count_resources();
  const testing::TemporaryFolder folder;
  testing::JobOptions options{.world_size = kWorldSize};
  options.processes.time_limit = seconds(60);
  const auto result =
      testing::run_job(options, [&](RankContext& context, const Membership& membership) {
        train_until_it_fails(context, membership, test, folder);
      });
  EXPECT_EQ(result.ranks[kVictim].signal, SIGKILL);
  const TimePoint disturbed = testing::read_moment(folder.file("moment"));
  const Duration limit = test.signal == SIGKILL ? kLimit : kStopTimeout + kLimit;
  for (const int rank : {0, 2}) {
    const auto& outcome = result.ranks[static_cast<size_t>(rank)];
    ASSERT_EQ(outcome.failure, "") << "rank " << rank << ", of all:\n" << result.failures();
    const testing::FailureReport report = testing::parse_report(outcome.output);
    EXPECT_THAT(mask(report.message), ::testing::AnyOfArray(trainer_golden_texts(test, rank)));
    EXPECT_GE((report.raised - disturbed).count(), 0) << "ns, rank " << rank;
    EXPECT_LT((report.raised - disturbed).count(), limit.count()) << "ns, rank " << rank;
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

std::vector<TrainerCase> all_trainer_cases() {
  std::vector<TrainerCase> cases;
  for (const int signal : {SIGKILL, SIGSTOP}) {
    for (const TrainerMoment moment :
         {TrainerMoment::kLossSum, TrainerMoment::kEvaluation, TrainerMoment::kSnapshot}) {
      cases.push_back({moment, signal});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, TrainerFailureTest, ::testing::ValuesIn(all_trainer_cases()),
                         name_of_trainer_case);

}  // namespace
}  // namespace cadre::train
