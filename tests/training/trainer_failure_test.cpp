// Tests a rank of a training run that kills or stops itself between a backward and the next step:
// while the ranks sum their losses, in the evaluation, and in the collective before a snapshot. On
// every survivor run() must throw an error that names the rank in time, and no process, thread or
// file may be leaked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/disturbed_job.h"
#include "cadre/testing/torch/group_fakes.h"
#include "cadre/train/trainer/trainer.h"

namespace cadre::train {
namespace {

using testing::DisturbedRank;
using testing::FakeGroup;
using testing::GroupCall;
using testing::mask;

constexpr int kWorldSize = 3;

// The operations that run() itself calls, besides the reductions of gradients.
constexpr std::array<const char*, 2> kOperations = {"all_reduce", "all_gather"};

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

// Disturbs the rank in an operation that run() itself calls. Reductions of gradients are not
// counted, nor operations while `is_running` is false. The sums in order are those of step 1, of
// step 2, of the evaluation after step 2, and so on.
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

testing::FailureReport train_until_it_fails(DisturbedRank& self, const ProcessGroup& world,
                                            TrainerMoment moment, const std::string& folder) {
  const FakeGroup fake(world);
  bool is_running = false;
  if (self.is_victim()) disturb_self_at(moment, fake, is_running, [&] { self.disturb_self(); });
  Trainer trainer(config_in(folder), {.world = fake.group(),
                                      .system = self.context.system,
                                      .time_in_communication = [] { return Duration(0); },
                                      .stop_is_requested = [] { return false; },
                                      .print = [](std::string_view) {}});
  is_running = true;
  return self.report_of([&] { trainer.run(); });
}

// Adds the messages that a survivor may throw if `seen` says in which operation the victim was last
// seen.
void add_golden_texts(const TrainerCase& test, int rank, const std::string& seen,
                      std::vector<std::string>& texts) {
  const std::string victim = "rank 1 (HOST, pid N)";
  const std::string self = format("rank {} (HOST, pid N)", rank);
  const std::string restart = "restart the job or call rejoin().";
  const std::string cause =
      format("\n  {} is gone: its connection ended, {}{}", victim, seen, ". Remedy: " + restart);
  const auto timed_out = [&](const std::string& name, int who) {
    return format(
        "{} on group \"world\" timed out after N s on rank {} (HOST, pid N)\n  waiting for {}, "
        "which does not answer: {}{}",
        name, who, victim, seen,
        ". Remedy: check that every rank calls this operation; then " + restart);
  };
  // The operations that this rank may be calling when it notices the failure.
  for (const char* const call : {"all_reduce #N", "cadre train (all_gather #N)", "all_gather #N"}) {
    const std::string failed = format("{} on group \"world\" failed after N s on {}", call, self);
    if (test.signal == SIGKILL) texts.push_back("kPeerLost: " + failed + cause);
    if (test.signal == SIGSTOP) texts.push_back("kTimeout: " + timed_out(call, rank));
    for (const char* const operation : kOperations) {
      if (test.signal == SIGKILL) {
        const std::string between =
            format("group \"world\" failed on {} after {} #N{}", self, operation, cause);
        texts.push_back("kPeerLost: " + between);
        // The group failed between two calls, and the second call reports it.
        texts.push_back("kPeerLost: " + failed + "\n  first failure: " + between);
        // The second call had succeeded by the time the failure reached it.
        for (const char* const later : kOperations) {
          texts.push_back(
              format("kPeerLost: group \"world\" failed on {} after {} #N\n  first failure: {}",
                     self, later, between));
        }
      } else {
        texts.push_back(format(
            "kAborted: {} on group \"world\" was aborted after N s on {}\n  first failure: {} "
            "Remedy: look at the first failure, then restart the job or call rejoin().",
            call, self, timed_out(format("{} #N", operation), 2 - rank)));
      }
    }
  }
}

// Returns every message that a survivor may throw, with numbers masked. There is a message for each
// operation in or after which it may have failed, and for a timeout also for each rank that may
// have reported it first.
std::vector<std::string> trainer_golden_texts(const TrainerCase& test, int rank) {
  // The victim acts before an operation, so the previous one may still be running on it.
  std::vector<std::string> texts;
  for (const char* const last : kOperations) {
    add_golden_texts(test, rank, format("last seen in {} #N, PHASE, N s ago", last), texts);
    add_golden_texts(test, rank, format("last seen after {} #N, N s ago", last), texts);
  }
  return texts;
}

class TrainerFailureTest : public ::testing::TestWithParam<TrainerCase> {};

TEST_P(TrainerFailureTest, EverySurvivorsRunNamesTheCulprit) {
  const TrainerCase& test = GetParam();
  const testing::TemporaryFolder folder;
  const auto outcome =
      testing::run_disturbed({.world_size = kWorldSize, .signal = test.signal},
                             testing::on_group([&](DisturbedRank& self, const ProcessGroup& world) {
                               return train_until_it_fails(self, world, test.moment, folder.path());
                             }));
  for (const auto& [rank, message] : outcome.messages) {
    EXPECT_THAT(mask(message), ::testing::AnyOfArray(trainer_golden_texts(test, rank)));
  }
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
