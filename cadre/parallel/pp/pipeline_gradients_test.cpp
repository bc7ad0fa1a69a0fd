// Tests which parameters have gradients after a step, and with which values, if a stage does not
// use each parameter exactly once: a tensor in two stages of a rank, parameters that no rank or
// only one replica uses, sparse gradients, and losses that ignore labels. Ranks are threads: each
// rank has one pipeline of two stages, and there are 2 replicas.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/pp_model.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::filled;
using ::testing::HasSubstr;
using testing::run_groups;
using torch::Tensor;

constexpr int64_t kWidth = 3;
constexpr int64_t kReplicaRows = 4;

Tensor weight_of(double offset) {
  return filled({kWidth, kWidth}, offset).requires_grad_();
}

Tensor residual_layer(const Tensor& x, const Tensor& weight) {
  return x + torch::tanh(torch::linear(x, weight));
}

Tensor mean_square(const Tensor& output, const Tensor& target) {
  return torch::mse_loss(output, target);
}

PipelineStage stage_with(int stage, const std::vector<NamedTensor>& parameters) {
  const Tensor weight = parameters[0].tensor;
  return {
      [weight](const std::vector<Tensor>& x) { return std::vector{residual_layer(x[0], weight)}; },
      parameters,
      {.stage = stage, .num_stages = 2}};
}

// Returns the inputs of one of the two replicas, which are different.
Tensor inputs_of(int replica) {
  return filled({kReplicaRows, kWidth}, 100 * replica + 20);
}
Tensor goals_of(int replica) {
  return filled({kReplicaRows, kWidth}, 100 * replica + 70);
}

void run_replicas(const std::function<void(const DeviceMesh&)>& body) {
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 1}, {"dp", 2}});
    body(mesh);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The gradients of the first of two steps are kept, and both are reduced once after the second
// step.
TEST(PipelineGradients, ATensorInTwoStagesOfARankIsReducedOnce) {
  const Tensor alone = weight_of(1);
  for (int step = 0; step < 2; ++step) {
    const Tensor x = torch::cat({inputs_of(step), inputs_of(step + 1)});
    const Tensor target = torch::cat({goals_of(step), goals_of(step + 1)});
    mean_square(residual_layer(residual_layer(x, alone), alone), target).backward();
  }
  for (const char* schedule : {"interleaved-1f1b", "looped-bfs", "zb-v"}) {
    run_replicas([&](const DeviceMesh& mesh) {
      const Tensor weight = weight_of(1);
      // The second stage lists the same tensor under two names.
      Pipeline pipeline(
          {stage_with(0, {{"weight", weight}}),
           stage_with(1, {{"weight", weight}, {"again", weight}})},
          mesh["pp"], {.schedule = schedule, .num_microbatches = 2, .replicas = mesh.group("dp")});
      for (int step = 0; step < 2; ++step) {
        const int batch = step + mesh.coordinate("dp");
        pipeline.step(inputs_of(batch), goals_of(batch), mean_square);
      }
      EXPECT_TRUE(torch::allclose(weight.grad(), alone.grad(), 1e-10, 1e-13)) << schedule;
    });
  }
}

// Whether a stage is on one rank, replicated, or sharded over the replicas.
enum class StageForm { kAlone, kReplicas, kShards };

PipelineOptions options_for(StageForm form, const DeviceMesh& mesh) {
  PipelineOptions options{.schedule = "interleaved-1f1b", .num_microbatches = 2};
  if (form == StageForm::kReplicas) options.replicas = mesh.group("dp");
  if (form == StageForm::kShards) options.shards = mesh["dp"];
  return options;
}

// Returns the number of parameters with this name that have a gradient.
int num_gradients(const Pipeline& pipeline, const std::string& name) {
  int count = 0;
  for (const ParameterShard& shard : pipeline.parameter_shards()) {
    if (shard.name == name && shard.values.grad().defined()) ++count;
  }
  return count;
}

// A parameter that no rank uses must have no gradient, as in one process. Then an optimizer does
// not change it, even with weight decay.
TEST(PipelineGradients, AParameterThatNoRankUsesHasNone) {
  for (const StageForm form : {StageForm::kAlone, StageForm::kReplicas, StageForm::kShards}) {
    for (const bool is_tied : {false, true}) {
      run_replicas([&](const DeviceMesh& mesh) {
        Pipeline pipeline({stage_with(0, {{"weight", weight_of(1)}, {"extra", weight_of(2)}}),
                           stage_with(1, {{"weight", weight_of(3)}, {"extra", weight_of(4)}})},
                          mesh["pp"], options_for(form, mesh));
        if (is_tied) pipeline.tie_parameters({{0, "extra"}, {1, "extra"}});
        for (int step = 0; step < 2; ++step) {
          pipeline.step(inputs_of(step), goals_of(step), mean_square);
          EXPECT_EQ(num_gradients(pipeline, "weight"), 2);
          EXPECT_EQ(num_gradients(pipeline, "extra"), 0);
        }
      });
    }
  }
}

// Returns stages with two weights a and b, one for each of two separate data paths: (x) -> (f(x,
// a), f(x, b)) -> ..., where f is residual_layer().
std::vector<PipelineStage> stages_of_two_paths(int num_stages, int first, int last) {
  std::vector<PipelineStage> stages;
  for (int stage = first; stage <= last; ++stage) {
    const Tensor used = weight_of(2 * stage + 1);
    const Tensor unused = weight_of(2 * stage + 2);
    stages.emplace_back(
        [=](const std::vector<Tensor>& x) {
          return std::vector{residual_layer(x[0], used), residual_layer(x[x.size() - 1], unused)};
        },
        std::vector<NamedTensor>{{"used", used}, {"unused", unused}},
        PipelineStageOptions{.stage = stage, .num_stages = num_stages});
  }
  return stages;
}

// The gradients of the unused path must be undefined. If they were zeros, weight decay and momentum
// would still change its weights.
void expect_gradients_of_one_path(const std::vector<PipelineStage>& stages) {
  for (const PipelineStage& stage : stages) {
    EXPECT_TRUE(stage.parameters()[0].tensor.grad().defined()) << "stage " << stage.stage();
    EXPECT_FALSE(stage.parameters()[1].tensor.grad().defined()) << "stage " << stage.stage();
  }
}

Tensor loss_of_one_path(const std::vector<Tensor>& outputs, const std::vector<Tensor>& targets) {
  return mean_square(outputs[0], targets[0]);
}

TEST(PipelineGradients, OutputsThatTheLossDoesNotUseHaveNone) {
  for (const char* schedule : {"1f1b", "zb-h1"}) {
    const auto result = run_groups(3, [&](const ProcessGroup& group) {
      const auto stages = stages_of_two_paths(3, group.rank(), group.rank());
      Pipeline pipeline(stages, group, {.schedule = schedule, .num_microbatches = 2});
      for (int step = 0; step < 2; ++step) {
        pipeline.step(inputs_of(0), goals_of(0), loss_of_one_path);
        expect_gradients_of_one_path(stages);
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
  for (const char* schedule : {"looped-bfs", "zb-v", "interleaved-zero-bubble"}) {
    const auto result = run_groups(1, [&](const ProcessGroup& group) {
      const auto stages = stages_of_two_paths(2, 0, 1);
      Pipeline pipeline(stages, group, {.schedule = schedule, .num_microbatches = 2});
      pipeline.step(inputs_of(0), goals_of(0), loss_of_one_path);
      expect_gradients_of_one_path(stages);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// Only the second microbatch uses the second path. The gradient of this path must equal that of one
// process.
TEST(PipelineGradients, AnOutputThatOneMicrobatchUsesHasItsGradient) {
  const auto loss = [](const std::vector<Tensor>& outputs, const std::vector<Tensor>& targets) {
    const bool is_second = targets[0].sum().item<double>() > 100;
    return mean_square(outputs[is_second ? 1 : 0], targets[0]);
  };
  const Tensor goals = torch::cat({goals_of(0).narrow(0, 0, 2), goals_of(0).narrow(0, 0, 2) + 50});
  const auto plain = stages_of_two_paths(2, 0, 1);
  for (const int64_t begin : {0, 2}) {
    const auto between = plain[0].forward({inputs_of(0).narrow(0, begin, 2)});
    (loss(plain[1].forward(between), {goals.narrow(0, begin, 2)}) / 2).backward();
  }
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto stages = stages_of_two_paths(2, group.rank(), group.rank());
    Pipeline pipeline(stages, group, {.num_microbatches = 2});
    pipeline.step(inputs_of(0), goals, PipelineLoss(loss));
    for (size_t i = 0; i < 2; ++i) {
      const Tensor expected =
          plain[static_cast<size_t>(group.rank())].parameters()[i].tensor.grad();
      EXPECT_TRUE(torch::allclose(stages[0].parameters()[i].tensor.grad(), expected, 1e-10, 1e-13));
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// If only one replica or one stage uses a parameter, the others contribute zeros to the sum.
TEST(PipelineGradients, AParameterThatOneReplicaUsesHasOneOnAll) {
  const Tensor alone = weight_of(2);
  const Tensor output = residual_layer(inputs_of(0) + alone.sum(), weight_of(3));
  (mean_square(output, goals_of(0)) / 2).backward();
  const double expected = alone.grad().abs().sum().item<double>();
  for (const StageForm form : {StageForm::kReplicas, StageForm::kShards}) {
    for (const bool is_tied : {false, true}) {
      run_replicas([&](const DeviceMesh& mesh) {
        const Tensor extra = weight_of(2);
        const bool is_used = mesh.coordinate("dp") == 1;
        const PipelineStage first(
            [=](const std::vector<Tensor>& x) {
              return std::vector{is_used ? x[0] + extra.sum() : x[0] + 0.0};
            },
            {{"extra", extra}}, {.stage = 0, .num_stages = 2});
        Pipeline pipeline(
            {first, stage_with(1, {{"weight", weight_of(3)}, {"other", weight_of(4)}})}, mesh["pp"],
            options_for(form, mesh));
        if (is_tied) pipeline.tie_parameters({{0, "extra"}, {1, "other"}});
        pipeline.step(inputs_of(0), goals_of(0), mean_square);
        EXPECT_EQ(num_gradients(pipeline, "extra"), is_tied ? 2 : 1);
        EXPECT_EQ(num_gradients(pipeline, "other"), 0);
        const Tensor sum = torch::zeros({}, torch::kDouble);
        for (const ParameterShard& shard : pipeline.parameter_shards()) {
          if (shard.name == "extra") sum.add_(shard.values.grad().abs().sum());
        }
        mesh.group("dp").all_reduce(sum);
        const int num_copies = (form == StageForm::kReplicas ? 2 : 1) * (is_tied ? 2 : 1);
        EXPECT_NEAR(sum.item<double>(), num_copies * expected, 1e-12);
      });
    }
  }
}

TEST(PipelineGradients, SparseOnesAreNotReduced) {
  for (const StageForm form : {StageForm::kReplicas, StageForm::kShards}) {
    run_replicas([&](const DeviceMesh& mesh) {
      const Tensor table = filled({6, kWidth}, 1).requires_grad_();
      const PipelineStage first(
          [table](const std::vector<Tensor>& x) {
            return std::vector{torch::embedding(table, x[0], -1, false, /*sparse=*/true)};
          },
          {{"table", table}}, {.stage = 0, .num_stages = 2});
      Pipeline pipeline({first, stage_with(1, {{"weight", weight_of(3)}})}, mesh["pp"],
                        options_for(form, mesh));
      EXPECT_THAT(
          failure_of([&] { pipeline.step(torch::arange(kReplicaRows), goals_of(0), mean_square); }),
          HasSubstr("the gradient of \"table\" is not dense; make it dense, for example by "
                    "an embedding with sparse(false)"));
    });
  }
}

// Tests the recipe of the guide for ignored labels: the loss is the mean over the labels of the
// whole batch that are not ignored.
TEST(PipelineGradients, IgnoredLabelsAreLeftOutOfTheMean) {
  const Tensor x = inputs_of(0);
  // All labels of the first microbatch are ignored.
  const Tensor labels = torch::tensor({-100, -100, 1, 2});
  const Tensor alone = weight_of(1);
  const Tensor expected =
      torch::nn::functional::cross_entropy(residual_layer(residual_layer(x, alone), alone), labels);
  expected.backward();
  const auto result = run_groups(1, [&](const ProcessGroup& group) {
    const Tensor weight = weight_of(1);
    Pipeline pipeline({stage_with(0, {{"weight", weight}}), stage_with(1, {{"weight", weight}})},
                      group, {.schedule = "interleaved-1f1b", .num_microbatches = 2});
    const double share = labels.ne(-100).to(torch::kDouble).mean().item<double>();
    const auto step = pipeline.step(x, labels, [=](const Tensor& logits, const Tensor& part) {
      const auto options = torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum);
      const Tensor sum = torch::nn::functional::cross_entropy(logits, part, options);
      return sum / (part.numel() * share);
    });
    EXPECT_NEAR(step.loss.item<double>(), expected.item<double>(), 1e-12);
    EXPECT_TRUE(torch::allclose(weight.grad(), alone.grad(), 1e-10, 1e-13));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
