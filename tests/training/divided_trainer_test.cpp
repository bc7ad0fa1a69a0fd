// Runs the trainer on processes that divide the model. In some tests, one process kills or stops
// itself in each phase of a run: every survivor must throw an error that names it in time, even if
// it shares no axis with it, and no process, thread or file may be leaked. In another test one
// stage of a pipeline is three times slower than the other, and the summary must name it. The seed
// CADRE_CASES_SEED chooses which cases CTest runs.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/disturbed_job.h"
#include "cadre/testing/torch/group_fakes.h"
#include "cadre/train/trainer/trainer.h"

namespace cadre::train {
namespace {

using testing::DisturbedRank;
using testing::FakeGroup;
using testing::GroupCall;
using testing::RankContext;

struct DividedRun {
  std::string name;
  int world_size = 2;
  ParallelConfig parallel;
};

const DividedRun kTensor{"tensor", 2, {.strategy = "single", .tensor = 2}};
const DividedRun kPipeline{"pipeline", 2, {.pipeline = 2}};
const DividedRun kThreeAxes{"three_axes", 8, {.tensor = 2, .sequence = true, .pipeline = 2}};

// Writes a text file into the folder, and returns the configuration of a small gpt that trains on
// this text.
Config config_of(const DividedRun& run, const testing::TemporaryFolder& folder) {
  Config config;
  config.model = {.layers = 2, .heads = 2, .width = 16, .context = 16};
  config.data.path = folder.file("text");
  std::ofstream text(config.data.path);
  for (int i = 0; i < 700; ++i) text << "line " << i * i % 97 << " of a text to learn\n";
  config.optimizer = default_optimizer("sgd");
  config.schedule.warmup_steps = 0;
  config.run = {.folder = folder.path(),
                .steps = 8,
                .global_batch_size = 8,
                .evaluate_every = 2,
                .evaluate_tokens = 500,
                .snapshot_every = 3};
  config.parallel = run.parallel;
  config.sample.tokens = 0;
  return config;
}

// From this call on, `act` is called before each operation of libtorch on this thread, in forward
// and backward. `operation` is its name, for example "aten::gelu".
void before_each_operation(std::function<void(std::string_view operation)> act) {
  static thread_local std::function<void(std::string_view)> act_of_thread;
  act_of_thread = std::move(act);
  at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function)
                                     -> std::unique_ptr<at::ObserverContext> {
        act_of_thread(function.name());
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
}

enum class RunPhase {
  kBetweenSteps,
  kForward,
  kBackward,
  kLossSum,
  kOptimizer,
  kEvaluation,
  kSnapshot
};

struct DividedFailureCase {
  DividedRun run;
  RunPhase phase;
  int signal;
};

std::string name_of_divided_failure(const DividedFailureCase& test) {
  const std::vector<std::string> phases = {"between_steps", "forward",    "backward", "loss_sum",
                                           "optimizer",     "evaluation", "snapshot"};
  return format("{}_{}_in_{}", test.run.name, test.signal == SIGKILL ? "kill" : "stop",
                phases[static_cast<size_t>(test.phase)]);
}

std::ostream& operator<<(std::ostream& out, const DividedFailureCase& test) {
  return out << name_of_divided_failure(test);
}

// Kills or stops the process in the given phase, after two losses have been summed. If a phase
// computes several blocks or microbatches, the process is disturbed in the second one, while
// messages are in flight.
class Trap {
 public:
  Trap(RunPhase phase, const FakeGroup& world, std::function<void()> act)
      : phase_(phase), act_(std::move(act)) {
    before_each_operation([this](std::string_view operation) { see(operation); });
    world.on_call = [this](GroupCall& call) {
      const bool is_of_bytes = call.input.scalar_type() == at::kByte;
      if (call.kind == OpKind::kAllGather && is_of_bytes) act_in(RunPhase::kSnapshot);
      call.pass_on();
    };
  }

  void begin_step() { act_in(RunPhase::kBetweenSteps); }
  void sum_losses() {
    if (is_armed()) act_in(RunPhase::kLossSum);
    ++num_sums_;
  }

 private:
  bool is_armed() const { return num_sums_ >= 2; }
  void act_in(RunPhase phase) const {
    if (is_armed() && phase_ == phase) act_();
  }
  void see(std::string_view operation) {
    if (operation == "aten::_fused_sgd_") act_in(RunPhase::kOptimizer);
    const bool is_forward = operation == "aten::gelu";
    if (!is_armed() || (!is_forward && operation != "aten::gelu_backward")) return;
    const RunPhase phase = !is_forward                  ? RunPhase::kBackward
                           : at::GradMode::is_enabled() ? RunPhase::kForward
                                                        : RunPhase::kEvaluation;
    if (phase == phase_ && ++num_seen_ == 2) act_();
  }

  const RunPhase phase_;
  const std::function<void()> act_;
  int num_sums_ = 0;
  int num_seen_ = 0;
};

class DividedTrainerFailure : public ::testing::TestWithParam<DividedFailureCase> {};

TEST_P(DividedTrainerFailure, IsNamedByAllSurvivorsInTime) {
  const DividedFailureCase& test = GetParam();
  const testing::TemporaryFolder folder;
  const Config config = config_of(test.run, folder);
  const auto train = [&](DisturbedRank& self, const ProcessGroup& group) {
    const FakeGroup world(group);
    Trap trap(test.phase, world, [&] {
      if (self.is_victim()) self.disturb_self();
    });
    return self.report_of([&] {
      Trainer trainer(config, {.world = world.group(),
                               .system = self.context.system,
                               .time_in_communication =
                                   [&] {
                                     trap.begin_step();
                                     return Duration(0);
                                   },
                               .stop_is_requested =
                                   [&] {
                                     trap.sum_losses();
                                     return false;
                                   },
                               .print = [](std::string_view) {}});
      trainer.run();
    });
  };
  const testing::DisturbedJob job{.world_size = test.run.world_size, .signal = test.signal};
  const auto outcome = testing::run_disturbed(job, testing::on_group(train));
  testing::expect_victim_named(
      job, outcome,
      test.run.world_size > 2 ? testing::WaitsIn::kGroupsOfAxes : testing::WaitsIn::kOneGroup);
}

std::vector<DividedFailureCase> divided_failure_cases() {
  std::vector<DividedFailureCase> cases;
  for (const RunPhase phase :
       {RunPhase::kBetweenSteps, RunPhase::kForward, RunPhase::kBackward, RunPhase::kLossSum,
        RunPhase::kOptimizer, RunPhase::kEvaluation, RunPhase::kSnapshot}) {
    for (const int signal : {SIGKILL, SIGSTOP}) {
      for (const DividedRun& run : {kTensor, kPipeline, kThreeAxes}) {
        cases.push_back({run, phase, signal});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, DividedTrainerFailure,
                         ::testing::ValuesIn(testing::share_of(divided_failure_cases())),
                         [](const auto& test) { return name_of_divided_failure(test.param); });

// Runs a pipeline in which each block takes 10 ms in forward and in backward, but 30 ms on the
// process `slow_rank`. Returns the output of the run.
std::string screen_of_run_with_slow(int slow_rank) {
  const testing::Resources before = testing::count_resources();
  const testing::TemporaryFolder folder;
  Config config = config_of(kPipeline, folder);
  config.run.steps = 3;
  testing::JobOptions options{.world_size = kPipeline.world_size};
  options.processes.time_limit = std::chrono::seconds(60);
  const auto result = testing::run_job(options, [&](RankContext& context,
                                                    const Membership& membership) {
    at::set_num_threads(1);
    const std::chrono::milliseconds pause(context.rank == slow_rank ? 30 : 10);
    before_each_operation([&](std::string_view operation) {
      if (operation.starts_with("aten::gelu")) testing::nap(context.system, pause);
    });
    const ProcessGroup world(testing::connect(context, membership, {}));
    {
      Trainer trainer(config, {.world = world,
                               .system = context.system,
                               .time_in_communication = [] { return Duration(0); },
                               .stop_is_requested = [] { return false; },
                               .print = [&](std::string_view text) { context.output += text; }});
      trainer.run();
    }
    world.close();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(testing::leftovers_since(before), "");
  return result.ranks[0].output;
}

TEST(SlowStage, OfAProcessIsNamedInTheSummaryOfTheRun) {
  for (const int slow_rank : {0, 1}) {
    EXPECT_THAT(screen_of_run_with_slow(slow_rank),
                ::testing::ContainsRegex(
                    format("stages compute for [0-9.]+ ms, [0-9.]+ ms a microbatch; stage {0} on "
                           "rank {0} takes [0-9.]+ times as long as the others, which wait for "
                           "it: look for other work on its cores\n",
                           slow_rank)));
  }
}

}  // namespace
}  // namespace cadre::train
