// Tests that a call throws on all ranks if the arguments of one rank, or of one of several
// replicas, are invalid, and that the groups stay usable. Ranks are threads: 2 stages (axis "pp")
// in each of 2 replicas (axis "dp").
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/pp/pipeline.h"
#include "cadre/parallel/shard/division/parameter_division.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/hooks/shard_mark.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/pp_model.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::cross_entropy;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::run_groups;
using testing::StageNet;
using testing::targets_of;
using testing::tokens_of;
using torch::Tensor;

constexpr size_t kNumRanks = 4;

// Runs `body` on all ranks and returns the error of each rank. Checks that the world still works
// afterwards. Rank 2 * pp + dp has the coordinates pp and dp.
std::vector<std::string> refusals(const std::function<void(const DeviceMesh&)>& body) {
  std::vector<std::string> texts(kNumRanks);
  const auto result = run_groups(kNumRanks, [&](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}});
    texts[static_cast<size_t>(world.rank())] = failure_of([&] { body(mesh); });
    world.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const std::string& text : texts) EXPECT_THAT(text, HasSubstr("kInvalidArgument"));
  return texts;
}

void expect_refused(const std::string& sentence,
                    const std::function<void(const DeviceMesh&)>& body) {
  for (const std::string& text : refusals(body)) EXPECT_THAT(text, HasSubstr(sentence));
}

std::vector<PipelineStage> stages_on(const DeviceMesh& mesh) {
  const int stage = mesh.coordinate("pp");
  return {{std::make_shared<StageNet>(stage, 2), {.stage = stage, .num_stages = 2}}};
}

// Returns one stage for this rank with these parameters. No computation uses them.
std::vector<PipelineStage> stages_with(const DeviceMesh& mesh,
                                       std::vector<NamedTensor> parameters) {
  return {{[](const std::vector<Tensor>& inputs) { return inputs; },
           std::move(parameters),
           {.stage = mesh.coordinate("pp"), .num_stages = 2}}};
}

Tensor leaf(const std::vector<int64_t>& sizes) {
  return torch::zeros(sizes, torch::kDouble).requires_grad_();
}

TEST(PipelineAgreement, OneReplicasWrongOptionsEndTheConstructorOnAll) {
  const auto texts = refusals([](const DeviceMesh& mesh) {
    Pipeline(
        stages_on(mesh), mesh["pp"],
        {.schedule = mesh.coordinate("dp") == 1 ? "2f2b" : "1f1b", .replicas = mesh.group("dp")});
  });
  for (const std::string& text : texts) {
    EXPECT_THAT(text, HasSubstr("there is no schedule \"2f2b\""));
    EXPECT_THAT(text, HasSubstr("(on rank 1 of 2 of group \"dp\")"));
  }
}

TEST(PipelineAgreement, ReplicasHaveOneSchedule) {
  expect_refused("the schedule is one of 2 stages and 2 microbatches", [](const DeviceMesh& mesh) {
    Pipeline(stages_on(mesh), mesh["pp"],
             {.num_microbatches = 2 + 2 * mesh.coordinate("dp"), .replicas = mesh.group("dp")});
  });
}

TEST(PipelineAgreement, AllRanksHaveReplicasOrNone) {
  expect_refused("pass the same options on all ranks", [](const DeviceMesh& mesh) {
    PipelineOptions options;
    if (mesh.coordinate("pp") == 0) options.replicas = mesh.group("dp");
    Pipeline(stages_on(mesh), mesh["pp"], options);
  });
  expect_refused("pass the same options on all ranks", [](const DeviceMesh& mesh) {
    Pipeline(stages_on(mesh), mesh["pp"], {.dynamic_shapes = mesh.coordinate("pp") == 0});
  });
}

TEST(PipelineAgreement, AStageThatOneRankCannotShardEndsTheConstructorOnAll) {
  const auto texts = refusals([](const DeviceMesh& mesh) {
    const Tensor first = leaf({4});
    const bool is_wrong = mesh.coordinate("pp") == 1 && mesh.coordinate("dp") == 1;
    const Tensor second = is_wrong ? first.detach().requires_grad_() : leaf({4});
    Pipeline(stages_with(mesh, {{"first", first}, {"second", second}}), mesh["pp"],
             {.shards = mesh["dp"]});
  });
  for (const std::string& text : texts) {
    EXPECT_THAT(text, HasSubstr("\"first\" and \"second\" share memory"));
    EXPECT_THAT(text, HasSubstr("(on rank 1 of 2 of group \"pp\")"));
  }
}

// The pipeline of the first constructor has freed the values of these modules, so the second
// constructor must throw. A program must make new modules and load a snapshot into them.
TEST(PipelineAgreement, ModulesOfAnEarlierShardedPipelineAreRefused) {
  expect_refused("a wrapper or optimizer has sharded them already", [](const DeviceMesh& mesh) {
    const auto stages = stages_on(mesh);
    { const Pipeline earlier(stages, mesh["pp"], {.shards = mesh["dp"]}); }
    Pipeline(stages, mesh["pp"], {.shards = mesh["dp"]});
  });
  expect_refused("a wrapper or optimizer has sharded them already", [](const DeviceMesh& mesh) {
    const auto stages = stages_on(mesh);
    { const Pipeline earlier(stages, mesh["pp"], {.shards = mesh["dp"]}); }
    Pipeline(stages, mesh["pp"], {.replicas = mesh.group("dp")});
  });
}

TEST(PipelineTies, ParametersOfOtherShapesAreRefused) {
  expect_refused(
      "\"weight\" of stage 0 is Double (2, 6), but \"weight\" of stage 1 is Double (6, 2)",
      [](const DeviceMesh& mesh) {
        const bool is_first = mesh.coordinate("pp") == 0;
        Pipeline pipeline(stages_with(mesh, {{"weight", is_first ? leaf({2, 6}) : leaf({6, 2})}}),
                          mesh["pp"]);
        pipeline.tie_parameters({{0, "weight"}, {1, "weight"}});
      });
}

// Returns this rank's part of a (4, 4) tensor, marked as divided in the same way as
// parallelize_module() does.
Tensor divided_leaf(const DeviceMesh& mesh, int64_t dim) {
  const Tensor part = dim == 0 ? leaf({2, 4}) : leaf({4, 2});
  wrap::mark_as_shard(
      part, {.parameter = "weight", .owner = "of the test", .rank = mesh.coordinate("dp")});
  shard::keep_division({.name = "weight",
                        .sizes = {4, 4},
                        .mesh = mesh["dp"],
                        .placements = {Shard(dim)},
                        .flat_axis = {},
                        .range = {.begin = 0, .end = 8},
                        .values = part,
                        .parameter = part});
  return part;
}

TEST(PipelineTies, ParametersThatAreDividedInOtherWaysAreRefused) {
  expect_refused(
      "\"weight\" of stage 0 is Double (4, 4), divided along dp in dim 0, but \"weight\" of stage "
      "1 is Double (4, 4), divided along dp in dim 1",
      [](const DeviceMesh& mesh) {
        const Tensor part = divided_leaf(mesh, mesh.coordinate("pp"));
        Pipeline pipeline(stages_with(mesh, {{"weight", part}}), mesh["pp"]);
        pipeline.tie_parameters({{0, "weight"}, {1, "weight"}});
      });
}

TEST(PipelineTies, AFrozenParameterAndATrainedOneAreRefused) {
  expect_refused("require grad on some ranks", [](const DeviceMesh& mesh) {
    const Tensor weight = leaf({3});
    weight.requires_grad_(mesh.coordinate("pp") == 0);
    Pipeline pipeline(stages_with(mesh, {{"weight", weight}}), mesh["pp"]);
    pipeline.tie_parameters({{0, "weight"}, {1, "weight"}});
  });
  expect_refused("require grad on some ranks", [](const DeviceMesh& mesh) {
    const auto stages = stages_on(mesh);
    Pipeline pipeline(stages, mesh["pp"]);
    pipeline.tie_parameters({{0, "table"}, {1, "head"}});
    if (mesh.coordinate("pp") == 1) {
      for (const auto& [name, tensor] : stages[0].parameters()) {
        if (name == "head") tensor.requires_grad_(false);
      }
    }
    const Tensor tokens = tokens_of(4, 0);
    pipeline.step(tokens, targets_of(tokens), cross_entropy);
  });
}

// Tying a parameter a second time would sum its gradients twice, so it is an error.
TEST(PipelineTies, AParameterIsTiedOnce) {
  expect_refused("is tied already; name all parameters of a tie in one call",
                 [](const DeviceMesh& mesh) {
                   Pipeline pipeline(stages_on(mesh), mesh["pp"]);
                   pipeline.tie_parameters({{0, "table"}, {1, "head"}});
                   pipeline.tie_parameters({{0, "table"}, {1, "head"}});
                 });
}

// Tying must throw: a norm would count the gradients of both tensors, and an optimizer would update
// the same memory twice.
TEST(PipelineTies, ATensorThatSharesMemoryWithATiedOneIsRefused) {
  const auto texts = refusals([](const DeviceMesh& mesh) {
    const Tensor head = leaf({3});
    std::vector<NamedTensor> parameters{{"head", head}};
    if (mesh.coordinate("pp") == 1) parameters.push_back({"again", head.detach().requires_grad_()});
    Pipeline pipeline(stages_with(mesh, parameters), mesh["pp"]);
    pipeline.tie_parameters({{0, "head"}, {1, "head"}});
  });
  for (const std::string& text : texts) {
    EXPECT_THAT(text,
                HasSubstr("\"head\" of stage 1 and \"again\" of stage 1 share memory, but are two "
                          "tensors with two gradients"));
  }
}

TEST(PipelineTies, ReplicasTieTheSameParameters) {
  expect_refused("the list of parameters to tie is 0:bias0, 1:bias0 on rank 0",
                 [](const DeviceMesh& mesh) {
                   Pipeline pipeline(stages_on(mesh), mesh["pp"], {.replicas = mesh.group("dp")});
                   const std::string name = mesh.coordinate("dp") == 0 ? "bias0" : "norm0.bias";
                   pipeline.tie_parameters({{0, name}, {1, name}});
                 });
}

// Runs a step of a pipeline on 2 ranks. All replicas use the same batch.
void step_once(Pipeline& pipeline, const PipelineStepOptions& options = {}) {
  const Tensor tokens = tokens_of(4, 0);
  pipeline.step(tokens, targets_of(tokens), cross_entropy, options);
}

// The replicas differ in one stage only. Without this error the ranks of the other stage would
// start a reduction that never completes.
TEST(PipelineAgreement, ReplicasTrainTheSameParameters) {
  const auto result = run_groups(kNumRanks, [&](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}});
    const auto stages = stages_on(mesh);
    Pipeline pipeline(stages, mesh["pp"], {.replicas = mesh.group("dp")});
    const Tensor changed = stages[0].parameters()[0].tensor;
    const bool is_frozen = mesh.coordinate("dp") == 1 && mesh.coordinate("pp") == 1;
    changed.requires_grad_(!is_frozen);
    EXPECT_THAT(
        failure_of([&] { step_once(pipeline); }),
        HasSubstr("the parameters that require grad in replica 0 differ from those in replica 1"));
    EXPECT_EQ(failure_of([&] { pipeline.forward(tokens_of(4, 0)); }), "");
    changed.requires_grad_(true);
    EXPECT_EQ(failure_of([&] { step_once(pipeline); }), "");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// If two stages share a tensor, its gradient is reduced once, so the same stages must share it in
// all replicas.
TEST(PipelineAgreement, ReplicasHaveATensorInTheSameStages) {
  expect_refused(", the same as ", [](const DeviceMesh& mesh) {
    const int stage = mesh.coordinate("pp");
    const Tensor first = leaf({3});
    const Tensor second = mesh.coordinate("dp") == 0 ? first : leaf({3});
    const auto identity = [](const std::vector<Tensor>& inputs) { return inputs; };
    Pipeline({{identity, {{"weight", first}}, {.stage = stage, .num_stages = 4}},
              {identity, {{"weight", second}}, {.stage = stage + 2, .num_stages = 4}}},
             mesh["pp"],
             {.schedule = "interleaved-1f1b", .num_microbatches = 2, .replicas = mesh.group("dp")});
  });
}

TEST(PipelineAgreement, ReplicasMakeTheSameCall) {
  expect_refused(
      "replica 0 calls step() and replica 1 calls forward(); all replicas must make the same call",
      [](const DeviceMesh& mesh) {
        Pipeline pipeline(stages_on(mesh), mesh["pp"], {.replicas = mesh.group("dp")});
        if (mesh.coordinate("dp") == 0) return step_once(pipeline);
        pipeline.forward(tokens_of(4, 0));
      });
}

TEST(PipelineAgreement, AllRanksBroadcastTheLossesOrNone) {
  expect_refused(
      "broadcast_losses is true on rank 0 and false on rank 1; pass the same value on all ranks",
      [](const DeviceMesh& mesh) {
        Pipeline pipeline(stages_on(mesh), mesh["pp"]);
        step_once(pipeline, {.broadcast_losses = mesh.coordinate("pp") == 0});
      });
}

}  // namespace
}  // namespace cadre
