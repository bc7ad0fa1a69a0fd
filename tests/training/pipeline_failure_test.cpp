// Tests a rank of a pipeline that kills or stops itself in each phase of a step: in a forward, in a
// backward, in a weight pass, in the optimizer, and between steps. Every survivor must throw an
// error that names the rank in time, even if it exchanges no messages with it, and no process,
// thread or file may be leaked.
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/schedule/generate.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/disturbed_job.h"

namespace cadre {
namespace {

using testing::DisturbedRank;
using torch::Tensor;

constexpr int kWorldSize = 4;
constexpr int kMicrobatches = 6;
// The microbatch in which the victim is disturbed, counted within the phase. Messages are in flight
// at that time.
constexpr int kDisturbedMicrobatch = 2;
constexpr int kSteps = 6;
constexpr int kStepOfFailure = 3;  // counted from 0
constexpr int64_t kFeatures = 16;

enum class PipelinePhase { kForward, kBackward, kWeightGrad, kOptimizer, kBetweenSteps };

struct PipelineFailureCase {
  std::string schedule;
  int num_replicas;
  PipelinePhase phase;
  int signal;
};

std::string name_of_pipeline_failure(const PipelineFailureCase& test) {
  const std::vector<std::string> phases = {"forward", "backward", "weight_grad", "optimizer",
                                           "between_steps"};
  std::string schedule = test.schedule;
  std::ranges::replace(schedule, '-', '_');
  return format("{}{}_{}_in_{}", schedule, test.num_replicas > 1 ? "_replicas" : "",
                test.signal == SIGKILL ? "kill" : "stop", phases[static_cast<size_t>(test.phase)]);
}

std::ostream& operator<<(std::ostream& out, const PipelineFailureCase& test) {
  return out << name_of_pipeline_failure(test);
}

// Kills or stops the process in one of the microbatches of a step.
struct Trap {
  void spring() {
    if (act && num_calls++ == kDisturbedMicrobatch) act();
  }
  int num_calls = 0;
  std::function<void()> act;
};

struct TrappedStage : torch::nn::Module {
  explicit TrappedStage(int number) {
    torch::manual_seed(number);
    first = register_module("first", torch::nn::Linear(kFeatures, kFeatures));
    second = register_module("second", torch::nn::Linear(kFeatures, kFeatures));
    if (number == 0) return;
    first->weight.register_hook([this](const Tensor&) { in_weight_grad.spring(); });
  }
  Tensor forward(const Tensor& x) {
    in_forward.spring();
    const Tensor hidden = torch::tanh(first(x));
    if (hidden.requires_grad()) {
      hidden.register_hook([this](const Tensor&) { in_backward.spring(); });
    }
    return second(hidden);
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  Trap in_forward, in_backward, in_weight_grad;
};

class TrappedSgd : public torch::optim::SGD {
 public:
  using SGD::SGD;
  Tensor step(LossClosure closure = nullptr) override {
    if (in_step) in_step();
    return SGD::step(std::move(closure));
  }
  std::function<void()> in_step;
};

// One rank of a pipeline, or of two pipelines whose gradients are averaged.
class PipelineRank {
 public:
  PipelineRank(const PipelineFailureCase& test, const ProcessGroup& world) {
    PipelineOptions options;
    ProcessGroup group = world;
    if (test.num_replicas > 1) {
      mesh_.emplace(world, std::vector<MeshAxis>{{"dp", test.num_replicas},
                                                 {"pp", kWorldSize / test.num_replicas}});
      group = mesh_->group("pp");
      options.replicas = mesh_->group("dp");
    }
    const PipelineSchedule schedule =
        make_pipeline_schedule({.kind = find_pipeline_schedule(test.schedule)->kind,
                                .num_ranks = group.world_size(),
                                .num_microbatches = kMicrobatches})
            .value_or_throw();
    options.schedule = schedule;
    std::vector<PipelineStage> stages;
    std::vector<Tensor> parameters;
    for (int stage = 0; stage < schedule.num_stages(); ++stage) {
      if (schedule.rank_of_stage[static_cast<size_t>(stage)] != group.rank()) continue;
      nets.push_back(std::make_shared<TrappedStage>(stage));
      stages.emplace_back(
          nets.back(), PipelineStageOptions{.stage = stage, .num_stages = schedule.num_stages()});
      for (const Tensor& parameter : nets.back()->parameters()) parameters.push_back(parameter);
    }
    pipeline_.emplace(stages, group, options);
    const int last = schedule.num_stages() - 1;
    pipeline_->tie_parameters({{0, "first.bias"}, {last, "second.bias"}});
    optimizer = std::make_unique<TrappedSgd>(parameters, torch::optim::SGDOptions(0.1));
  }
  // Closes the mesh, unless an error is unwinding the stack: then only the destructor of the mesh
  // runs.
  ~PipelineRank() {
    if (mesh_) mesh_->close();
  }
  PipelineRank(const PipelineRank&) = delete;
  PipelineRank& operator=(const PipelineRank&) = delete;

  void step() {
    optimizer->zero_grad();
    const Tensor x = torch::ones({2 * kMicrobatches, kFeatures});
    pipeline_->step(x, x, [](const Tensor& output, const Tensor& target) {
      return torch::mse_loss(output, target);
    });
    optimizer->step();
  }

  std::vector<std::shared_ptr<TrappedStage>> nets;
  std::unique_ptr<TrappedSgd> optimizer;

 private:
  std::optional<DeviceMesh> mesh_;
  std::optional<Pipeline> pipeline_;
};

void disturb_in(PipelinePhase phase, PipelineRank& rank, const std::function<void()>& act) {
  TrappedStage& net = *rank.nets.back();
  switch (phase) {
    case PipelinePhase::kForward:
      net.in_forward.act = act;
      return;
    case PipelinePhase::kBackward:
      net.in_backward.act = act;
      return;
    case PipelinePhase::kWeightGrad:
      net.in_weight_grad.act = act;
      return;
    case PipelinePhase::kOptimizer:
      rank.optimizer->in_step = act;
      return;
    case PipelinePhase::kBetweenSteps:
      act();
  }
}

class PipelineFailure : public ::testing::TestWithParam<PipelineFailureCase> {};

TEST_P(PipelineFailure, IsNamedByAllSurvivorsInTime) {
  const PipelineFailureCase& test = GetParam();
  const testing::DisturbedJob job{.world_size = kWorldSize, .signal = test.signal};
  const auto train = [&](DisturbedRank& self, const ProcessGroup& group) {
    PipelineRank rank(test, group);
    return self.report_of([&] {
      for (int number = 0; number < kSteps; ++number) {
        if (number == kStepOfFailure && self.is_victim()) {
          disturb_in(test.phase, rank, [&] { self.disturb_self(); });
        }
        rank.step();
      }
    });
  };
  const auto outcome = testing::run_disturbed(job, testing::on_group(train));
  testing::expect_victim_named(
      job, outcome,
      test.num_replicas > 1 ? testing::WaitsIn::kGroupsOfAxes : testing::WaitsIn::kOneGroup);
}

std::vector<PipelineFailureCase> pipeline_failure_cases() {
  struct Layout {
    std::string schedule;
    int num_replicas;
    bool has_weight_grads;
  };
  const std::vector<Layout> layouts = {
      {"1f1b", 1, false}, {"zb-h1", 1, true}, {"zb-v", 1, true}, {"zb-h1", 2, true}};
  std::vector<PipelineFailureCase> cases;
  for (const PipelinePhase phase :
       {PipelinePhase::kForward, PipelinePhase::kBackward, PipelinePhase::kWeightGrad,
        PipelinePhase::kOptimizer, PipelinePhase::kBetweenSteps}) {
    for (const int signal : {SIGKILL, SIGSTOP}) {
      for (const Layout& layout : layouts) {
        if (phase == PipelinePhase::kWeightGrad && !layout.has_weight_grads) continue;
        cases.push_back({layout.schedule, layout.num_replicas, phase, signal});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, PipelineFailure,
                         ::testing::ValuesIn(testing::share_of(pipeline_failure_cases())),
                         [](const auto& test) { return name_of_pipeline_failure(test.param); });

}  // namespace
}  // namespace cadre
