// Tests that wrong combinations of strategies throw a clear error. The ranks are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/linear.h"
#include "cadre/parallel/shard/grad_scaler.h"
#include "cadre/parallel/shard/nonfinite_gradients.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/torch/axes_layouts.h"
#include "cadre/testing/torch/axes_training.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using testing::AxesGpt;
using testing::AxesRank;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using torch::Tensor;

std::shared_ptr<AxesGpt> divided(const DeviceMesh& mesh) {
  auto part = testing::make_axes_gpt({}, torch::kDouble, 1);
  parallelize_module(*part, mesh["tp"], part->plan());
  return part;
}

TEST(AxesMisuse, AWrapperOnAMeshOfItsOwnIsRefused) {
  const auto result = testing::run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"dp", 2}, {"tp", 2}});
    const DeviceMesh other(world, {{"all", 4}});
    const auto part = divided(mesh);
    EXPECT_THAT(failure_of([&] { FullyShardedDataParallel model(part, other); }),
                HasSubstr("the two come from different meshes; slice both from one mesh of all "
                          "ranks"));
    const DeviceMesh flat = mesh.flatten({"dp", "tp"}, "all");
    EXPECT_THAT(failure_of([&] { FullyShardedDataParallel model(part, flat); }),
                HasSubstr("overlaps axis"));
    const DistributedDataParallelOptions sharded{.gradients = GradientPlacement::kSharded};
    EXPECT_THAT(failure_of([&] { DistributedDataParallel model(part, world, sharded); }),
                HasSubstr("in a group of ranks that hold the same shards of its parameters"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A rank of the group "dp" has another number in that group than in the world; the error must have
// both.
TEST(AxesMisuse, AnErrorOfAWrapperAlongAnAxisNamesTheGroupAndTheWorldRank) {
  const auto result = testing::run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"dp", 2}, {"tp", 2}});
    const auto net = std::make_shared<torch::nn::LinearImpl>(2, 2);
    DistributedDataParallel model{net, mesh.group("dp")};
    net->register_parameter("more", torch::zeros({2}));
    const std::string place =
        format("DistributedDataParallel, rank {} of group \"dp\" (world rank {}): since the module",
               mesh.coordinate("dp"), world.rank());
    EXPECT_THAT(failure_of([&] { model(torch::ones({1, 2})); }), HasSubstr(place));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The ranks along tp hold parts of one model, and each group of ranks along dp has a wrapper of its
// own. The warning must be logged once, not once for each part.
TEST(AxesMisuse, AModelWithoutUnitsIsLoggedOnceForAllPartsOfIt) {
  const auto log = std::make_shared<testing::LogLines>();
  const auto result =
      testing::run_groups(4,
                          [](const ProcessGroup& world) {
                            const DeviceMesh mesh(world, {{"dp", 2}, {"tp", 2}});
                            const FullyShardedDataParallel model(divided(mesh), mesh["dp"]);
                          },
                          {.log = log});
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(log->get(),
              ::testing::ElementsAre(HasSubstr("fsdp the model has no unit beside the root")));
}

TEST(AxesMisuse, APipelineOnAMeshOfItsOwnIsRefused) {
  const auto result = testing::run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 2}, {"tp", 2}});
    const DeviceMesh other(world, {{"pp", 2}, {"tp", 2}});
    const auto whole = testing::make_axes_gpt({}, torch::kDouble, 1);
    const int stage = mesh.coordinate("pp");
    const auto part = testing::stage_of(*whole, stage, 2);
    parallelize_module(*part, mesh["tp"], part->plan());
    const std::vector<PipelineStage> stages{{part, {.stage = stage, .num_stages = 2}}};
    const std::string sentence =
        "cadre::Pipeline: its axis and those that divide its parameters must come from one mesh of "
        "all ranks, as mesh[\"pp\"] and mesh[\"tp\"]";
    EXPECT_THAT(failure_of([&] { Pipeline pipeline(stages, other["pp"]); }), HasSubstr(sentence));
    EXPECT_THAT(failure_of([&] { Pipeline pipeline(stages, mesh.group("pp")); }),
                HasSubstr(sentence));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(AxesMisuse, ReplicasAndShardsTogetherAreRefused) {
  const auto result = testing::run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}});
    const auto whole = testing::make_axes_gpt({}, torch::kDouble, 1);
    const int stage = mesh.coordinate("pp");
    const std::vector<PipelineStage> stages{
        {testing::stage_of(*whole, stage, 2), {.stage = stage, .num_stages = 2}}};
    EXPECT_THAT(failure_of([&] {
                  Pipeline pipeline(stages, mesh["pp"],
                                    {.replicas = mesh.group("dp"), .shards = mesh["dp"]});
                }),
                HasSubstr("both replicas and shards are given"));
    EXPECT_THAT(failure_of([&] {
                  Pipeline pipeline(
                      stages, mesh["pp"],
                      {.schedule = "1f1b", .shards = mesh["dp"], .max_unsharded_stages = 0});
                }),
                HasSubstr("max_unsharded_stages is 0"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The replicas of this pipeline hold different parts of the layers, so a reduction would mix
// different parameters.
TEST(AxesMisuse, ReplicasThatHoldOtherPartsAreRefused) {
  const auto result = testing::run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 2}, {"tp", 2}});
    const auto whole = testing::make_axes_gpt({}, torch::kDouble, 1);
    const int stage = mesh.coordinate("pp");
    const auto part = testing::stage_of(*whole, stage, 2);
    // Only the ranks of the first stage have divided layers, so only they can detect the mistake.
    // The ranks of the other stage must get the error from them.
    if (stage == 0) parallelize_module(*part, mesh["tp"], part->plan());
    const std::vector<PipelineStage> stages{{part, {.stage = stage, .num_stages = 2}}};
    const std::string message = failure_of([&] {
      Pipeline pipeline(stages, mesh["pp"], {.num_microbatches = 2, .replicas = mesh.group("tp")});
    });
    EXPECT_THAT(message, HasSubstr("in a group of ranks that hold the same shards of its "
                                   "parameters"));
    if (stage == 1) EXPECT_THAT(message, HasSubstr("(on rank 0 of 2 of group \"pp\")"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(AxesMisuse, ATensorOfTwoShardedStagesIsRefused) {
  const auto result = testing::run_groups(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 1}, {"dp", 2}});
    const auto whole = testing::make_axes_gpt({}, torch::kDouble, 1);
    const auto first = testing::stage_of(*whole, 0, 2);
    const auto last = testing::stage_of(*whole, 1, 2);
    last->tokens->weight = first->tokens->weight;
    const auto function_of = [](const std::shared_ptr<AxesGpt>& part) {
      return [part](const std::vector<Tensor>& inputs) {
        return std::vector<Tensor>{part->forward(inputs[0])};
      };
    };
    const std::vector<NamedTensor> shared{{"tokens.weight", first->tokens->weight}};
    EXPECT_THAT(failure_of([&] {
                  Pipeline pipeline({{function_of(first), shared, {.stage = 0, .num_stages = 2}},
                                     {function_of(last), shared, {.stage = 1, .num_stages = 2}}},
                                    mesh["pp"],
                                    {.schedule = "interleaved-1f1b", .shards = mesh["dp"]});
                }),
                HasSubstr("\"tokens.weight\" of stage 1 is also a parameter of stage 0"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(AxesMisuse, ALayerThatWasDividedAlongNoMeshIsRefused) {
  const auto result = testing::run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"dp", 2}, {"tp", 2}});
    const auto layer = std::make_shared<ColumnParallelLinearImpl>(torch::nn::LinearOptions(4, 6),
                                                                  mesh.group("tp"));
    EXPECT_THAT(failure_of([&] { FullyShardedDataParallel model(layer, mesh["dp"]); }),
                HasSubstr("\"weight\" is the shard of rank"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A wrapper over a divided module has gradients of this rank's shards only: a norm, or a decision
// whether all gradients are finite, would differ between the ranks of the axis tp.
TEST(AxesMisuse, AWrapperOverDividedParametersHasNoNorm) {
  const auto result = testing::run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"dp", 2}, {"tp", 2}});
    const auto part = divided(mesh);
    DistributedDataParallel model{part, mesh.group("dp")};
    ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1));
    GradScaler scaler;
    const std::string shard = "is this rank's shard of";
    EXPECT_THAT(failure_of([&] { clip_grad_norm_(model, 1.0); }),
                AllOf(HasSubstr(shard), HasSubstr("call clip_grad_norm_(records, max_norm) with")));
    EXPECT_THAT(failure_of([&] { check_gradients_finite(model); }),
                AllOf(HasSubstr(shard), HasSubstr("call check_gradients_finite(records) with")));
    EXPECT_THAT(failure_of([&] { scaler.unscale_(model); }),
                AllOf(HasSubstr(shard), HasSubstr("call GradScaler::unscale_(records) with")));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The gradient of a parameter of one stage is not finite. All ranks must get an error with the name
// of the parameter and the rank.
TEST(AxesGradients, OneThatIsNotFiniteIsFoundOnAllStages) {
  const testing::Case sgd{"gpt", "sgd", testing::kAxesRows, torch::kDouble};
  const auto result = testing::run_groups(8, [&](const ProcessGroup& world) {
    const testing::Layout layout = testing::axes_layout("pp_x_fsdp_x_tp");
    const auto whole = testing::make_axes_gpt(layout.kind, torch::kDouble, 1);
    AxesRank rank(layout, sgd, world, *whole, testing::axes_batches(1));
    rank.backward(1);
    const std::vector<ParameterShard> records = rank.records();
    require(!find_nonfinite_gradient(std::span<const ParameterShard>(records)),
            "no gradient may be reported as not finite");
    for (const ParameterShard& record : records) {
      if (record.name == "second.down.weight" && world.rank() == 7) {
        record.values.grad().fill_(std::numeric_limits<double>::infinity());
      }
    }
    const auto found = find_nonfinite_gradient(std::span<const ParameterShard>(records));
    require(found.has_value() && found->parameter == "second.down.weight",
            "the gradient that is not finite was not found");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
