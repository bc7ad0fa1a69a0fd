// Tests that training in a pipeline on 2 to 4 ranks equals training in one process: the losses of
// each step, the final parameters and the outputs of an evaluation, in float64, within 1e-10 of the
// largest value of each parameter. Ranks are threads. Ranks add the gradients of microbatches in
// another order than one process adds rows, so gradients differ by a few roundings. SGD propagates
// these differences linearly. AdamW divides by the size of the gradient, which amplifies the
// differences if a gradient is small: the bound allows gradients that are 1e-5 times smaller than
// their terms. CADRE_CASES_SEED selects the subset of the cases that CTest runs.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/schedule/generate.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/pp_model.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::all_stages;
using testing::cross_entropy;
using testing::forward_all;
using testing::run_groups;
using testing::StageNet;
using testing::targets_of;
using testing::tokens_of;
using torch::Tensor;

constexpr int kNumSteps = 4;

struct PipelineCase {
  PipelineScheduleOptions schedule;
  int rows = 8;
  bool is_tied = false;
  bool recompute = false;
  bool uses_adamw = false;
};

std::string text_of(const PipelineCase& given) {
  std::string name(info_of(given.schedule.kind).name);
  std::ranges::replace(name, '-', '_');
  return format("{}_r{}_m{}_v{}_rows{}{}{}_{}", name, given.schedule.num_ranks,
                given.schedule.num_microbatches, *given.schedule.stages_per_rank, given.rows,
                given.is_tied ? "_tied" : "", given.recompute ? "_recompute" : "",
                given.uses_adamw ? "adamw" : "sgd");
}

std::ostream& operator<<(std::ostream& out, const PipelineCase& given) {
  return out << text_of(given);
}

// Returns cases for every schedule on 2 to 4 ranks. Other properties vary between the cases.
std::vector<PipelineCase> pipeline_cases() {
  std::vector<PipelineCase> cases;
  for (const PipelineScheduleInfo& info : pipeline_schedules()) {
    for (int num_ranks = 2; num_ranks <= 4; ++num_ranks) {
      for (const int num_microbatches : {1, 3, 4, 8}) {
        for (int stages_per_rank = 1; stages_per_rank <= 3; ++stages_per_rank) {
          const PipelineScheduleOptions options{info.kind, num_ranks, num_microbatches,
                                                stages_per_rank};
          if (!make_pipeline_schedule(options).ok()) continue;
          // The other properties are chosen by a hash of the case's index, so that every subset of
          // the cases has all of them.
          const uint64_t bits = (cases.size() * 0x9e3779b97f4a7c15) >> 32;
          cases.push_back({.schedule = options,
                           .rows = num_microbatches + static_cast<int>(bits % 5),
                           .is_tied = (bits >> 8) % 2 == 0,
                           .recompute = (bits >> 12) % 4 == 0,
                           .uses_adamw = (bits >> 16) % 2 == 0});
        }
      }
    }
  }
  return cases;
}

using Snapshot = std::vector<std::vector<Tensor>>;  // indexed by stage and parameter

Snapshot empty_snapshot(int num_stages) {
  return Snapshot(static_cast<size_t>(num_stages));
}

std::vector<Tensor> copies(const StageNet& stage) {
  std::vector<Tensor> result;
  for (const Tensor& parameter : stage.parameters()) result.push_back(parameter.detach().clone());
  return result;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(bool uses_adamw,
                                                        const std::vector<Tensor>& parameters) {
  if (uses_adamw) {
    return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.003));
  }
  return std::make_unique<torch::optim::SGD>(parameters,
                                             torch::optim::SGDOptions(0.05).momentum(0.9));
}

std::vector<Tensor> distinct(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> result;
  for (const Tensor& tensor : tensors) {
    const auto is_same = [&](const Tensor& other) { return other.is_same(tensor); };
    if (tensor.requires_grad() && std::ranges::none_of(result, is_same)) result.push_back(tensor);
  }
  return result;
}

struct Trained {
  std::vector<double> losses;
  Snapshot parameters;
  Tensor logits;  // the outputs of an evaluation after training
};

// Trains the model in one process, on whole batches.
Trained train_alone(const PipelineCase& given, int num_stages, int num_replicas) {
  at::set_num_threads(1);  // each rank uses one thread, too
  const auto stages = all_stages(num_stages);
  if (given.is_tied && num_stages > 1) stages.back()->head = stages[0]->table;
  std::vector<Tensor> parameters;
  for (const auto& stage : stages) {
    for (const Tensor& parameter : stage->parameters()) parameters.push_back(parameter);
  }
  // The tied weight replaces the head's own weight, which then gets no gradient.
  const auto optimizer = make_optimizer(given.uses_adamw, distinct(parameters));
  Trained trained;
  for (int step = 0; step < kNumSteps; ++step) {
    const Tensor tokens = tokens_of(given.rows * num_replicas, step);
    optimizer->zero_grad();
    const Tensor loss = cross_entropy(forward_all(stages, tokens), targets_of(tokens));
    loss.backward();
    trained.losses.push_back(loss.item<double>());
    optimizer->step();
  }
  const torch::NoGradGuard no_grad;
  trained.logits = forward_all(stages, tokens_of(given.rows * num_replicas, 50));
  for (const auto& stage : stages) trained.parameters.push_back(copies(*stage));
  if (given.is_tied && num_stages > 1) {
    const auto& last = stages.back()->named_parameters();
    for (size_t i = 0; i < last.size(); ++i) {
      if (last[i].key() == "head") {
        trained.parameters.back()[i] = stages[0]->table.detach().clone();
      }
    }
  }
  return trained;
}

// A mistake that a rank makes on purpose, to show that the comparison finds it.
enum class Mistake { kNone, kSwappedMicrobatches, kNotTied };

struct RankTask {
  PipelineCase given;
  ProcessGroup group;
  std::optional<ProcessGroup> replicas = {};
  Mistake mistake = Mistake::kNone;
};

// Swaps the targets of the first two microbatches.
Tensor with_swapped_microbatches(const Tensor& target, int num_microbatches) {
  const int64_t rows = target.size(0) / num_microbatches;
  return torch::cat(
      {target.slice(0, rows, 2 * rows), target.slice(0, 0, rows), target.slice(0, 2 * rows)});
}

// Trains the stages of one rank, and writes the results to `trained`.
void train_rank(const RankTask& task, Trained& trained) {
  const PipelineCase& given = task.given;
  const ProcessGroup& group = task.group;
  const auto schedule = make_pipeline_schedule(given.schedule).value_or_throw();
  std::vector<std::shared_ptr<StageNet>> nets;
  std::vector<PipelineStage> stages;
  std::vector<Tensor> parameters;
  for (int stage = 0; stage < schedule.num_stages(); ++stage) {
    if (schedule.rank_of_stage[stage] != group.rank()) continue;
    nets.push_back(std::make_shared<StageNet>(stage, schedule.num_stages()));
    stages.emplace_back(nets.back(), PipelineStageOptions{.stage = stage,
                                                          .num_stages = schedule.num_stages(),
                                                          .recompute = given.recompute});
    for (const Tensor& parameter : nets.back()->parameters()) parameters.push_back(parameter);
  }
  Pipeline pipeline(
      stages, group,
      {.schedule = schedule, .allow_uneven_microbatches = true, .replicas = task.replicas});
  const bool is_tied = given.is_tied && schedule.num_stages() > 1;
  if (is_tied && task.mistake != Mistake::kNotTied) {
    pipeline.tie_parameters({{0, "table"}, {schedule.num_stages() - 1, "head"}});
  }
  const auto optimizer = make_optimizer(given.uses_adamw, distinct(parameters));
  const int num_replicas = task.replicas ? task.replicas->world_size() : 1;
  const int replica = task.replicas ? task.replicas->rank() : 0;
  const auto part_of = [&](const Tensor& whole) {
    return whole.slice(0, given.rows * replica, given.rows * (replica + 1));
  };
  for (int step = 0; step < kNumSteps; ++step) {
    const Tensor tokens = part_of(tokens_of(given.rows * num_replicas, step));
    Tensor target = targets_of(tokens);
    if (task.mistake == Mistake::kSwappedMicrobatches) {
      target = with_swapped_microbatches(target, schedule.num_microbatches);
    }
    optimizer->zero_grad();
    const PipelineResult result =
        pipeline.step(tokens, target, cross_entropy, {.broadcast_losses = true});
    if (group.rank() == 0 && replica == 0) trained.losses.push_back(result.loss.item<double>());
    EXPECT_EQ(result.peak_live_microbatches, peak_live_activations(schedule)[group.rank()]);
    for (int stage = 0; stage < schedule.num_stages(); ++stage) {
      const auto at = static_cast<size_t>(stage);
      EXPECT_EQ(result.compute_times[at] > Duration(0), schedule.rank_of_stage[at] == group.rank());
    }
    optimizer->step();
  }
  if (task.mistake == Mistake::kNone) pipeline.check_tied_parameters();
  const auto result = pipeline.forward(part_of(tokens_of(given.rows * num_replicas, 50)));
  if (!result.outputs.empty() && replica == 0) trained.logits = result.outputs[0];
  if (replica != 0) return;
  for (const auto& net : nets) trained.parameters[net->stage] = copies(*net);
}

// Returns the largest difference between two sets of parameters, relative to the largest value of
// the parameter.
double worst_difference(const Snapshot& trained, const Snapshot& alone) {
  double worst = 0;
  for (size_t stage = 0; stage < alone.size(); ++stage) {
    EXPECT_EQ(trained[stage].size(), alone[stage].size());
    if (trained[stage].size() != alone[stage].size()) return 1;  // the stage's rank has failed
    for (size_t i = 0; i < alone[stage].size(); ++i) {
      const Tensor difference = (trained[stage][i] - alone[stage][i]).abs().max();
      worst =
          std::max(worst, difference.item<double>() / alone[stage][i].abs().max().item<double>());
    }
  }
  return worst;
}

Trained train_in_pipeline(const PipelineCase& given, Mistake mistake = Mistake::kNone) {
  const int num_ranks = given.schedule.num_ranks;
  Trained trained{.losses = {},
                  .parameters = empty_snapshot(num_ranks * *given.schedule.stages_per_rank),
                  .logits = {}};
  const auto result = run_groups(num_ranks, [&](const ProcessGroup& group) {
    train_rank({.given = given, .group = group, .replicas = {}, .mistake = mistake}, trained);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return trained;
}

class PipelineEquality : public ::testing::TestWithParam<PipelineCase> {};

TEST_P(PipelineEquality, EqualsOneProcess) {
  const PipelineCase& given = GetParam();
  const int num_stages = given.schedule.num_ranks * *given.schedule.stages_per_rank;
  const Trained alone = train_alone(given, num_stages, 1);
  const Trained trained = train_in_pipeline(given);
  const double worst = worst_difference(trained.parameters, alone.parameters);
  EXPECT_LE(worst, 1e-10);
  RecordProperty("worst_difference", format("{}", worst));
  ASSERT_EQ(trained.losses.size(), alone.losses.size());
  for (size_t step = 0; step < alone.losses.size(); ++step) {
    EXPECT_NEAR(trained.losses[step], alone.losses[step], 1e-10) << "step " << step;
  }
  ASSERT_TRUE(trained.logits.defined());
  EXPECT_TRUE(torch::allclose(trained.logits, alone.logits, 1e-9, 1e-10));
}

INSTANTIATE_TEST_SUITE_P(Cases, PipelineEquality,
                         ::testing::ValuesIn(testing::share_of(pipeline_cases())),
                         [](const auto& test) { return text_of(test.param); });

const PipelineCase kPlain{
    .schedule = {PipelineScheduleKind::k1F1B, 2, 4, 1}, .rows = 8, .is_tied = true};

TEST(PipelineMistake, SwappedMicrobatchesAreFound) {
  const Trained alone = train_alone(kPlain, 2, 1);
  const Trained trained = train_in_pipeline(kPlain, Mistake::kSwappedMicrobatches);
  EXPECT_GT(worst_difference(trained.parameters, alone.parameters), 1e-6);
}

TEST(PipelineMistake, AMissingTieIsFound) {
  const Trained alone = train_alone(kPlain, 2, 1);
  const Trained trained = train_in_pipeline(kPlain, Mistake::kNotTied);
  EXPECT_GT(worst_difference(trained.parameters, alone.parameters), 1e-6);
}

TEST(PipelineReplicas, EqualOneProcessOnTheBatchesOfAllReplicas) {
  for (const bool is_tied : {false, true}) {
    for (const auto kind : {PipelineScheduleKind::k1F1B, PipelineScheduleKind::kZbH1}) {
      const PipelineCase given{.schedule = {kind, 2, 3, 1}, .rows = 5, .is_tied = is_tied};
      const Trained alone = train_alone(given, 2, 2);
      Trained trained{.losses = {}, .parameters = empty_snapshot(2), .logits = {}};
      const auto result = run_groups(4, [&](const ProcessGroup& world) {
        const DeviceMesh mesh(world, {{"dp", 2}, {"pp", 2}});
        train_rank({.given = given, .group = mesh.group("pp"), .replicas = mesh.group("dp")},
                   trained);
        mesh.close();
      });
      ASSERT_TRUE(result.ok()) << result.failures();
      EXPECT_LE(worst_difference(trained.parameters, alone.parameters), 1e-10);
    }
  }
}

// The optimizer steps after every second step of the pipeline. The gradients of the first step are
// kept, and both are reduced only once.
TEST(PipelineAccumulation, StepsAddToTheGradients) {
  const auto alone = all_stages(2);
  alone[1]->head = alone[0]->table;
  for (int step = 0; step < 2; ++step) {
    const Tensor tokens = tokens_of(8, step);
    cross_entropy(forward_all(alone, tokens), targets_of(tokens)).backward();
  }
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto net = std::make_shared<StageNet>(group.rank(), 2);
    Pipeline pipeline({{net, {.stage = group.rank(), .num_stages = 2}}}, group,
                      {.schedule = "zb-h1", .num_microbatches = 4});
    pipeline.tie_parameters({{0, "table"}, {1, "head"}});
    for (int step = 0; step < 2; ++step) {
      const Tensor tokens = tokens_of(8, step);
      pipeline.step(tokens, targets_of(tokens), cross_entropy);
    }
    const auto expected = alone[group.rank()]->named_parameters();
    for (const auto& parameter : net->named_parameters()) {
      const Tensor& gradient =
          parameter.key() == "head" ? alone[0]->table.grad() : expected[parameter.key()].grad();
      EXPECT_EQ(parameter.value().grad().defined(), gradient.defined()) << parameter.key();
      if (!gradient.defined()) continue;
      EXPECT_TRUE(torch::allclose(parameter.value().grad(), gradient, 1e-10, 1e-13))
          << parameter.key();
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// If shapes change between steps, headers are sent again; otherwise they are sent once.
TEST(PipelineShapes, MayChangeFromStepToStep) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto net = std::make_shared<StageNet>(group.rank(), 2);
    Pipeline pipeline({{net, {.stage = group.rank(), .num_stages = 2}}}, group,
                      {.num_microbatches = 2});
    for (const int rows : {4, 4, 6, 4}) {
      const Tensor tokens = tokens_of(rows, 0);
      const Tensor expected = cross_entropy(forward_all(all_stages(2), tokens), targets_of(tokens));
      const auto trained =
          pipeline.step(tokens, targets_of(tokens), cross_entropy, {.broadcast_losses = true});
      EXPECT_NEAR(trained.loss.item<double>(), expected.item<double>(), 1e-12);
      const auto evaluated =
          pipeline.forward(tokens, targets_of(tokens), cross_entropy, {.broadcast_losses = true});
      EXPECT_NEAR(evaluated.loss.item<double>(), expected.item<double>(), 1e-12);
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Messages of 2 MB are sent through shared memory and over TCP. The model computes x w_0 w_1 ...,
// so its gradients are known.
TEST(PipelineMessages, LargeOnesGoThroughEverySchedule) {
  constexpr int kRanks = 3;
  constexpr int kMicrobatches = 6;
  for (const PipelineScheduleInfo& info : pipeline_schedules()) {
    const auto schedule =
        make_pipeline_schedule(
            {.kind = info.kind, .num_ranks = kRanks, .num_microbatches = kMicrobatches})
            .value_or_throw();
    const int num_stages = schedule.num_stages();
    const auto train = [&](const ProcessGroup& group) {
      std::vector<PipelineStage> stages;
      std::vector<Tensor> weights;
      for (int stage = 0; stage < num_stages; ++stage) {
        if (schedule.rank_of_stage[stage] != group.rank()) continue;
        const Tensor weight = torch::full({1}, 1 + stage / 8.0, torch::kDouble).requires_grad_();
        weights.push_back(weight);
        stages.emplace_back(
            [weight](const std::vector<Tensor>& x) { return std::vector<Tensor>{x[0] * weight}; },
            std::vector<NamedTensor>{{"weight", weight}},
            PipelineStageOptions{.stage = stage, .num_stages = num_stages});
      }
      Pipeline pipeline(stages, group, {.schedule = schedule});
      const Tensor x = torch::full({kMicrobatches, 250'000}, 0.5, torch::kDouble);
      const auto trained =
          pipeline.step(x, x, [](const Tensor& output, const Tensor&) { return output.mean(); },
                        {.broadcast_losses = true});
      double product = 0.5;
      for (int stage = 0; stage < num_stages; ++stage) product *= 1 + stage / 8.0;
      EXPECT_NEAR(trained.loss.item<double>(), product, 1e-9);
      for (const Tensor& weight : weights) {
        EXPECT_NEAR(weight.grad().item<double>(), product / weight.item<double>(), 1e-9);
      }
    };
    for (const auto transport : {TransportChoice::kAuto, TransportChoice::kTcp}) {
      const auto result = run_groups(kRanks, train, {.transport = transport});
      EXPECT_TRUE(result.ok()) << info.name << ": " << result.failures();
    }
  }
}

// Only one stage computes at a time, because there is only one microbatch (naive model
// parallelism). The test also runs a group of one rank.
TEST(PipelineNaive, RunsWithOneMicrobatch) {
  for (const int num_ranks : {1, 3}) {
    const auto alone = all_stages(num_ranks);
    const Tensor tokens = tokens_of(4, 0);
    const Tensor expected = cross_entropy(forward_all(alone, tokens), targets_of(tokens));
    const auto result = run_groups(num_ranks, [&](const ProcessGroup& group) {
      const auto net = std::make_shared<StageNet>(group.rank(), num_ranks);
      Pipeline pipeline({{net, {.stage = group.rank(), .num_stages = num_ranks}}}, group);
      const auto trained =
          pipeline.step(tokens, targets_of(tokens), cross_entropy, {.broadcast_losses = true});
      EXPECT_NEAR(trained.loss.item<double>(), expected.item<double>(), 1e-12);
      EXPECT_EQ(trained.peak_live_microbatches, 1);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

}  // namespace
}  // namespace cadre
