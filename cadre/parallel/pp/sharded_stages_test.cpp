// Tests stages whose parameters are sharded over the ranks that have the same stages. Under every
// schedule they train like whole replicas, which pipeline_equality_test.cpp compares with one
// process. Gradients are sums of the same terms, so parameters differ by a few roundings at most.
// Ranks are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/core/schedule/generate.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/pp_model.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::run_groups;
using testing::StageNet;
using torch::Tensor;

constexpr int kMicrobatches = 4;
constexpr int kRowsOfARank = 6;

// The modules and the pipeline of one rank, and the parameters of the pipeline before two of them
// were tied, because a program may have made its optimizer at that time.
struct ShardedRank {
  std::vector<std::shared_ptr<StageNet>> nets;
  std::unique_ptr<Pipeline> pipeline;
  std::vector<Tensor> parameters;
};

ShardedRank make_sharded_rank(const PipelineSchedule& schedule, const DeviceMesh& mesh,
                              bool is_sharded, bool recompute) {
  ShardedRank rank;
  std::vector<PipelineStage> stages;
  const int num_stages = schedule.num_stages();
  for (int stage = 0; stage < num_stages; ++stage) {
    if (schedule.rank_of_stage[static_cast<size_t>(stage)] != mesh.coordinate("pp")) continue;
    rank.nets.push_back(std::make_shared<StageNet>(stage, num_stages));
    stages.emplace_back(
        rank.nets.back(),
        PipelineStageOptions{.stage = stage, .num_stages = num_stages, .recompute = recompute});
  }
  PipelineOptions options{.schedule = schedule, .allow_uneven_microbatches = true};
  if (is_sharded) {
    options.shards = mesh["dp"];
    options.max_unsharded_stages = 1;
  } else {
    options.replicas = mesh.group("dp");
  }
  rank.pipeline = std::make_unique<Pipeline>(stages, mesh["pp"], options);
  rank.parameters = rank.pipeline->parameters();
  rank.pipeline->tie_parameters({{0, "table"}, {num_stages - 1, "head"}});
  return rank;
}

std::vector<Tensor> trained_parameters(PipelineScheduleKind kind, bool is_sharded) {
  const auto schedule =
      make_pipeline_schedule({.kind = kind, .num_ranks = 2, .num_microbatches = kMicrobatches})
          .value_or_throw();
  std::vector<Tensor> trained;
  const auto result = run_groups(4, [&](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}});
    const bool recompute = kind == PipelineScheduleKind::k1F1B;
    const ShardedRank rank = make_sharded_rank(schedule, mesh, is_sharded, recompute);
    std::vector<Tensor> stepped;
    for (const Tensor& values : rank.parameters) {
      if (values.requires_grad()) stepped.push_back(values);
    }
    torch::optim::SGD optimizer(stepped, torch::optim::SGDOptions(0.05).momentum(0.9));
    for (int step = 0; step < 6; ++step) {
      if (step % 2 == 0) optimizer.zero_grad();
      const Tensor tokens = testing::tokens_of(2 * kRowsOfARank, step)
                                .narrow(0, mesh.coordinate("dp") * kRowsOfARank, kRowsOfARank);
      rank.pipeline->step(tokens, testing::targets_of(tokens), testing::cross_entropy);
      // The optimizer takes one step after every two steps of the pipeline.
      if (step % 2 == 1) optimizer.step();
    }
    rank.pipeline->check_tied_parameters();
    const auto records = rank.pipeline->parameter_shards();
    std::vector<Tensor> whole;
    for (const NamedTensor& named : shard::gather_values(records)) whole.push_back(named.tensor);
    if (world.rank() == 0) trained = whole;
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return trained;
}

TEST(ShardedStages, TrainAsWholeOnesUnderEverySchedule) {
  for (const PipelineScheduleInfo& info : pipeline_schedules()) {
    const std::vector<Tensor> whole = trained_parameters(info.kind, /*is_sharded=*/false);
    const std::vector<Tensor> sharded = trained_parameters(info.kind, /*is_sharded=*/true);
    ASSERT_FALSE(whole.empty()) << info.name;
    ASSERT_EQ(sharded.size(), whole.size()) << info.name;
    for (size_t i = 0; i < whole.size(); ++i) {
      const double difference = (sharded[i] - whole[i]).abs().max().item<double>();
      EXPECT_LE(difference, 1e-12 * whole[i].abs().max().item<double>())
          << info.name << ", parameter " << i;
    }
  }
}

// Each stage runs one all_gather of its parameters and one reduction of its gradients in a step,
// whatever the number of microbatches. A step also runs one collective before it, to compare
// arguments, and one after it, to count which parameters were used. Between steps ranks keep only
// shards.
TEST(ShardedStages, AreGatheredAndReducedOnceInAStep) {
  const auto schedule =
      make_pipeline_schedule(
          {.kind = PipelineScheduleKind::k1F1B, .num_ranks = 2, .num_microbatches = kMicrobatches})
          .value_or_throw();
  const auto result = run_groups(4, [&](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}});
    const auto net = std::make_shared<StageNet>(mesh.coordinate("pp"), 2);
    Pipeline pipeline({{net, {.stage = mesh.coordinate("pp"), .num_stages = 2}}}, mesh["pp"],
                      {.schedule = schedule, .shards = mesh["dp"]});
    const Communicator& communicator = mesh.group("dp").communicator();
    const Tensor tokens = testing::tokens_of(8, 0);
    for (int step = 0; step < 2; ++step) {
      const uint64_t before = communicator.num_collectives();
      pipeline.step(tokens, testing::targets_of(tokens), testing::cross_entropy);
      EXPECT_EQ(communicator.num_collectives() - before, 4);
    }
    const uint64_t before = communicator.num_collectives();
    pipeline.forward(tokens);
    EXPECT_EQ(communicator.num_collectives() - before, 2);
    EXPECT_THAT(testing::failure_of([&] { net->bias[0].sum(); }),
                ::testing::HasSubstr("they are whole during step() and forward() of the pipeline"));
    EXPECT_THAT(testing::failure_of([&] { net->bias[0].grad().sum(); }),
                ::testing::HasSubstr("Make the optimizer from the pipeline"));
    const int64_t num_owned = num_elements(pipeline.parameters());
    const int64_t num_all = num_elements(net->parameters());
    const Tensor sum = torch::full({1}, num_owned, torch::kLong);
    mesh.group("dp").all_reduce(sum);
    EXPECT_EQ(sum.item<int64_t>(), num_all);
    EXPECT_LT(num_owned, num_all);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The two stages of one rank on a mesh {pp: 2, dp: 2}, with one row in each microbatch.
struct InterleavedRank {
  InterleavedRank(const DeviceMesh& mesh, const PipelineOptions& options,
                  const std::function<void(const StageNet&)>& before_forward) {
    std::vector<PipelineStage> stages;
    for (const int stage : {mesh.coordinate("pp"), mesh.coordinate("pp") + 2}) {
      const auto net = std::make_shared<StageNet>(stage, 4);
      nets.push_back(net);
      stages.emplace_back(
          [net, before_forward](const std::vector<Tensor>& inputs) {
            if (before_forward) before_forward(*net);
            return net->forward(inputs);
          },
          distinct_parameters(*net), PipelineStageOptions{.stage = stage, .num_stages = 4});
    }
    PipelineOptions given = options;
    given.schedule = "interleaved-1f1b";
    given.num_microbatches = 2;
    pipeline = std::make_unique<Pipeline>(stages, mesh["pp"], given);
  }

  void step(int number) const {
    const Tensor tokens = testing::tokens_of(2, number);
    pipeline->step(tokens, testing::targets_of(tokens), testing::cross_entropy);
  }

  std::vector<std::shared_ptr<StageNet>> nets;
  std::unique_ptr<Pipeline> pipeline;
};

TEST(ShardedStages, NoMoreStagesAreWholeThanAllowed) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}});
    std::vector<std::shared_ptr<StageNet>> nets;
    int num_checked = 0;
    const InterleavedRank rank(
        mesh, {.shards = mesh["dp"], .max_unsharded_stages = 1}, [&](const StageNet& computing) {
          for (const auto& net : nets) {
            if (net->stage == computing.stage) continue;
            ++num_checked;
            EXPECT_THAT(testing::failure_of([&] { net->bias[0].sum(); }),
                        ::testing::HasSubstr("they are whole during step() and forward()"));
          }
        });
    nets = rank.nets;
    rank.step(0);
    EXPECT_EQ(num_checked, 4);
    rank.pipeline->forward(testing::tokens_of(2, 0));
    EXPECT_EQ(num_checked, 8);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// If max_unsharded_stages covers all stages of a rank, an evaluation gathers each stage once,
// before it is used.
TEST(ShardedStages, AnEvaluationGathersEachStageOnceWhereAllFit) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}});
    const InterleavedRank rank(mesh, {.shards = mesh["dp"]}, nullptr);
    const uint64_t before = mesh.group("dp").communicator().num_collectives();
    rank.pipeline->forward(testing::tokens_of(2, 0));
    // 3 collectives: one to compare arguments, and a gather of each of the two stages.
    EXPECT_EQ(mesh.group("dp").communicator().num_collectives() - before, 3);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The shards have room for gradients only of the parameters that required grad when the pipeline
// was constructed.
TEST(ShardedStages, OtherTrainedParametersAreRefused) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}});
    const InterleavedRank rank(mesh, {.shards = mesh["dp"]}, nullptr);
    const auto expect_refused = [&](const std::string& sentence) {
      EXPECT_THAT(testing::failure_of([&] { rank.step(0); }),
                  ::testing::AnyOf(::testing::HasSubstr(sentence),
                                   ::testing::HasSubstr("refused its arguments of a step")));
    };
    // The rank of stage 0 changes requires_grad of a parameter of stage 0, and the rank of stage 1
    // of one in stage 1. All ranks must throw.
    const bool is_first = mesh.coordinate("pp") == 0;
    const Tensor trained = rank.nets[0]->bias[0];
    if (is_first) trained.requires_grad_(false);
    expect_refused(
        "\"bias0\" of stage 0 required grad when the pipeline was constructed, and does not now");
    trained.requires_grad_(true);
    const Tensor frozen = rank.nets[0]->up[0];
    EXPECT_EQ(frozen.requires_grad(), is_first);
    frozen.requires_grad_(true);
    expect_refused(
        "\"up0\" of stage 1 did not require grad when the pipeline was constructed, and does now");
    frozen.requires_grad_(is_first);
    const Tensor values = rank.pipeline->parameters()[0];
    const bool required_grad = values.requires_grad();
    if (is_first) values.requires_grad_(false);
    expect_refused(" of stage 0 required grad when the pipeline was constructed");
    values.requires_grad_(required_grad);
    rank.step(0);
    EXPECT_EQ(values.grad().defined(), required_grad);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Rank 0 fails in a step. The next step throws on both ranks, so no rank computes with the
// remaining state of the failed step.
TEST(ShardedStages, AFailedStepIsTheLastOne) {
  const auto result = run_groups(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 1}, {"dp", 2}});
    const auto net = std::make_shared<StageNet>(0, 1);
    bool is_planted = true;
    const TensorFunction function = [&](const std::vector<Tensor>& inputs) {
      if (is_planted && world.rank() == 0 && net->num_forwards == 2) {
        throw std::runtime_error("planted");
      }
      return net->forward(inputs);
    };
    Pipeline pipeline({PipelineStage(function, distinct_parameters(*net), {})}, mesh["pp"],
                      {.num_microbatches = 2, .shards = mesh["dp"]});
    const Tensor tokens = testing::tokens_of(2, 0);
    const auto step = [&] {
      return testing::failure_of(
          [&] { pipeline.step(tokens, testing::targets_of(tokens), testing::cross_entropy); });
    };
    EXPECT_EQ(step(), "");
    EXPECT_THAT(step(), ::testing::HasSubstr("planted"));
    is_planted = false;
    EXPECT_THAT(step(), ::testing::HasSubstr("planted"));
  });
}

// Trains for two steps with SGD, and returns the parameters of all stages, gathered from all ranks.
std::vector<Tensor> trained_on(const DeviceMesh& mesh, const DeviceMesh& shards) {
  const InterleavedRank rank(mesh, {.shards = shards}, nullptr);
  torch::optim::SGD optimizer(rank.pipeline->parameters(), 0.1);
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    rank.step(step);
    optimizer.step();
  }
  std::vector<Tensor> whole;
  const auto records = rank.pipeline->parameter_shards();
  for (const NamedTensor& named : shard::gather_values(records)) whole.push_back(named.tensor);
  return whole;
}

TEST(ShardedStages, MayLieAlongAFlattenedAxis) {
  const auto result = run_groups(8, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"a", 2}, {"pp", 2}, {"b", 2}});
    const auto flat = trained_on(mesh, mesh.flatten({"a", "b"}, "rows")["rows"]);
    const auto two_axes = trained_on(mesh, mesh.slice({"a", "b"}));
    ASSERT_EQ(flat.size(), two_axes.size());
    for (size_t i = 0; i < flat.size(); ++i) {
      EXPECT_TRUE(torch::allclose(flat[i], two_axes[i], 1e-12, 1e-14)) << i;
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
