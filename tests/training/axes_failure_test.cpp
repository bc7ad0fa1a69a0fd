// Tests a rank of a mesh that kills or stops itself in each phase of a step. The mesh has only
// tensor parallelism, shards and tensor parallelism, or three axes. The phases are: before the
// blocks in forward, after them in backward, before the norm over all axes, in the optimizer, and
// between steps. Every survivor must throw an error that names the rank in time, even if it shares
// no axis with it, and no process, thread or file may be leaked. The seed CADRE_CASES_SEED chooses
// which cases CTest runs.
#include <gtest/gtest.h>
#include <signal.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/axes_layouts.h"
#include "cadre/testing/torch/axes_training.h"
#include "cadre/testing/torch/disturbed_job.h"

namespace cadre {
namespace {

using testing::AxesRank;
using testing::DisturbedRank;
using testing::Layout;

constexpr int kSteps = 4;
constexpr int kStepOfFailure = 3;  // counted from 1

enum class AxesPhase { kForward, kBackward, kClip, kOptimizer, kBetweenSteps };

struct AxesFailureCase {
  Layout layout;
  AxesPhase phase;
  int signal;
};

std::string name_of_axes_failure(const AxesFailureCase& test) {
  const std::vector<std::string> phases = {"forward", "backward", "clip", "optimizer",
                                           "between_steps"};
  return format("{}_{}_in_{}", test.layout.name, test.signal == SIGKILL ? "kill" : "stop",
                phases[static_cast<size_t>(test.phase)]);
}

std::ostream& operator<<(std::ostream& out, const AxesFailureCase& test) {
  return out << name_of_axes_failure(test);
}

// Runs one training step, and calls `act` in the given phase.
void step_disturbed(AxesRank& rank, int64_t step, AxesPhase phase,
                    const std::function<void()>& act) {
  const auto act_in = [&](AxesPhase here) {
    if (act && phase == here) act();
  };
  act_in(AxesPhase::kBetweenSteps);
  rank.disturb([=] { act_in(AxesPhase::kForward); }, [=] { act_in(AxesPhase::kBackward); },
               [=] { act_in(AxesPhase::kClip); });
  rank.backward(step);
  act_in(AxesPhase::kOptimizer);
  rank.update(step);
}

class AxesFailure : public ::testing::TestWithParam<AxesFailureCase> {};

TEST_P(AxesFailure, IsNamedByAllSurvivorsInTime) {
  const AxesFailureCase& test = GetParam();
  const testing::DisturbedJob job{.world_size = test.layout.num_ranks(), .signal = test.signal};
  const auto train = [&](DisturbedRank& self, const ProcessGroup& group) {
    const auto whole = testing::make_axes_gpt(test.layout.kind, torch::kDouble, 3);
    AxesRank rank(test.layout, {"gpt", "sgd", testing::kAxesRows, torch::kDouble}, group, *whole,
                  testing::axes_batches(kSteps));
    const auto report = self.report_of([&] {
      for (int64_t step = 1; step <= kSteps; ++step) {
        std::function<void()> act;
        if (step == kStepOfFailure && self.is_victim()) act = [&] { self.disturb_self(); };
        step_disturbed(rank, step, test.phase, act);
      }
    });
    rank.close();
    return report;
  };
  const auto outcome = testing::run_disturbed(job, testing::on_group(train));
  testing::expect_victim_named(
      job, outcome,
      test.layout.axes.size() > 1 ? testing::WaitsIn::kGroupsOfAxes : testing::WaitsIn::kOneGroup);
}

std::vector<AxesFailureCase> axes_failure_cases() {
  const std::vector<Layout> layouts = {{.name = "tp", .axes = {{"tp", 2}}},
                                       testing::axes_layout("fsdp_x_tp"),
                                       testing::axes_layout("pp_x_dp_x_tp")};
  std::vector<AxesFailureCase> cases;
  for (const AxesPhase phase : {AxesPhase::kForward, AxesPhase::kBackward, AxesPhase::kClip,
                                AxesPhase::kOptimizer, AxesPhase::kBetweenSteps}) {
    for (const int signal : {SIGKILL, SIGSTOP}) {
      for (const Layout& layout : layouts) cases.push_back({layout, phase, signal});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, AxesFailure,
                         ::testing::ValuesIn(testing::share_of(axes_failure_cases())),
                         [](const auto& test) { return name_of_axes_failure(test.param); });

}  // namespace
}  // namespace cadre
