// Tests programs that replace parameters of stages, or whose forward writes to them, and
// constructors that throw. Ranks are threads: each of 2 ranks has its own pipeline, and the two
// pipelines are replicas or the ranks own shards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/parallel/shard/grad_scaler.h"
#include "cadre/tensor/hooks/gradient_norm.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/pp_model.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::pipeline_parameters_test {
namespace {

using testing::failure_of;
using testing::filled;
using ::testing::HasSubstr;
using testing::run_groups;
using torch::Tensor;

constexpr int64_t kWidth = 3;

// An embedding table. Its forward returns the selected rows and may write to the table.
struct Table : torch::nn::Module {
  explicit Table(std::function<void(const Tensor& weight, const Tensor& rows)> given)
      : change(std::move(given)) {
    weight = register_parameter("weight", filled({6, kWidth}, 1));
  }
  Tensor forward(const Tensor& rows) {
    if (change) {
      const torch::NoGradGuard no_grad;
      change(weight, rows);
    }
    return torch::embedding(weight, rows);
  }
  // Replaces the weight, as a program that exchanges a layer between two steps does.
  void replace() {
    parameters_.erase("weight");
    weight = register_parameter("weight", filled({6, kWidth}, 2));
  }

  std::function<void(const Tensor& weight, const Tensor& rows)> change;
  Tensor weight;
};

enum class Form { kAlone, kReplicas, kShards };

PipelineOptions options_for(Form form, const DeviceMesh& mesh) {
  PipelineOptions options{.num_microbatches = 2};
  if (form == Form::kReplicas) options.replicas = mesh.group("dp");
  if (form == Form::kShards) options.shards = mesh["dp"];
  return options;
}

void run_on_two(const std::function<void(const DeviceMesh&)>& body) {
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    body(DeviceMesh(world, {{"pp", 1}, {"dp", 2}}));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

std::string failure_of_step(Pipeline& pipeline, const Tensor& rows) {
  return failure_of([&] {
    pipeline.step(
        rows, torch::zeros({4, kWidth}, torch::kDouble),
        [](const Tensor& output, const Tensor& target) { return torch::mse_loss(output, target); });
  });
}

// clip_grad_norm_() of pipeline.parameters() throws: these are the parameters of this rank's
// stages, and a norm over them alone would differ between ranks.
TEST(PipelineParameters, ANormOfThemAloneIsRefused) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const Pipeline pipeline(
        {{std::make_shared<Table>(nullptr), {.stage = group.rank(), .num_stages = 2}}}, group);
    const std::vector<Tensor> own = pipeline.parameters();
    EXPECT_THAT(failure_of([&] { clip_grad_norm_(own, 1.0); }),
                ::testing::AllOf(
                    HasSubstr(format("clip_grad_norm_: parameter 0 of 1 in the list is "
                                     "\"weight\" of stage {0} (rank {0} of the 2 of its pipeline)",
                                     group.rank())),
                    HasSubstr("with the wrapper or the pipeline")));
    GradScaler scaler;
    EXPECT_THAT(failure_of([&] { scaler.unscale_(std::span<const Tensor>(own)); }),
                HasSubstr("GradScaler::unscale_: parameter 0"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  const Pipeline alone({{std::make_shared<Table>(nullptr), {}}}, init_process_group());
  EXPECT_EQ(clip_grad_norm_(alone.parameters(), 1.0), 0.0);
}

TEST(PipelineParameters, AReplacedOneIsRefused) {
  for (const Form form : {Form::kAlone, Form::kReplicas, Form::kShards}) {
    run_on_two([&](const DeviceMesh& mesh) {
      const auto table = std::make_shared<Table>(nullptr);
      Pipeline pipeline({{table, {}}}, mesh["pp"], options_for(form, mesh));
      const Tensor rows = torch::arange(4);
      EXPECT_EQ(failure_of_step(pipeline, rows), "");
      // Only one of two replicas replaces its table. The other rank throws, too, because the
      // replicas compare their parameters.
      if (form != Form::kReplicas || mesh.coordinate("dp") == 1) table->replace();
      EXPECT_THAT(failure_of_step(pipeline, rows),
                  HasSubstr("\"weight\" was replaced by another tensor in the module of stage 0"));
    });
  }
}

// Writes as torch::nn::Embedding with max_norm does: the batch determines which rows change.
void shrink(const Tensor& weight, const Tensor& rows) {
  weight.index_put_({rows}, weight.index({rows}) * 0.5);
}

TEST(PipelineParameters, AForwardThatWritesOtherValuesInEachReplicaIsRefused) {
  const auto result = run_groups(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 1}, {"dp", 2}});
    const auto table = std::make_shared<Table>(shrink);
    Pipeline pipeline({{table, {}}}, mesh["pp"], options_for(Form::kReplicas, mesh));
    EXPECT_THAT(failure_of_step(pipeline, torch::arange(4) + mesh.coordinate("dp")),
                HasSubstr("a forward() has written to \"weight\" of stage 0, and its values in "
                          "replica 1 are not those in replica 0"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The forward normalizes the weight, with the same result on all replicas.
TEST(PipelineParameters, AForwardThatWritesTheSameInEachReplicaIsNotRefused) {
  run_on_two([](const DeviceMesh& mesh) {
    const auto table = std::make_shared<Table>(
        [](const Tensor& weight, const Tensor&) { weight.div_(weight.norm()); });
    Pipeline pipeline({{table, {}}}, mesh["pp"], options_for(Form::kReplicas, mesh));
    const Tensor rows = torch::arange(4) + mesh.coordinate("dp");
    EXPECT_EQ(failure_of_step(pipeline, rows), "");
    EXPECT_EQ(failure_of_step(pipeline, rows), "");
  });
}

TEST(PipelineParameters, AForwardThatWritesToAShardedStageIsRefused) {
  for (const bool is_training : {true, false}) {
    run_groups(2, [&](const ProcessGroup& world) {
      const DeviceMesh mesh(world, {{"pp", 1}, {"dp", 2}});
      const auto table = std::make_shared<Table>(shrink);
      Pipeline pipeline({{table, {}}}, mesh["pp"], options_for(Form::kShards, mesh));
      const Tensor rows = torch::arange(4);
      const std::string failure = is_training ? failure_of_step(pipeline, rows)
                                              : failure_of([&] { pipeline.forward(rows); });
      EXPECT_THAT(failure,
                  HasSubstr("forward() has written to \"weight\" of stage 0, whose values are in "
                            "shards"));
    });
  }
}

// A forward may change the weight of its stage if there are neither replicas nor shards.
TEST(PipelineParameters, AForwardMayWriteToAStageOfOneRank) {
  run_on_two([](const DeviceMesh& mesh) {
    const auto table = std::make_shared<Table>(shrink);
    Pipeline pipeline({{table, {}}}, mesh["pp"], options_for(Form::kAlone, mesh));
    EXPECT_EQ(failure_of_step(pipeline, torch::arange(4) + mesh.coordinate("dp")), "");
  });
}

// If the constructor throws, the values, sizes and memory of the parameters are unchanged on all
// ranks.
TEST(PipelineParameters, ARefusedConstructorLeavesThemAsTheyWere) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}});
    const int stage = mesh.coordinate("pp");
    const auto weight_of = [&](std::vector<int64_t> sizes) {
      return (torch::ones(sizes, torch::kDouble) * (world.rank() + 1)).requires_grad_();
    };
    const auto expect_unchanged = [&](const std::vector<NamedTensor>& parameters,
                                      const PipelineOptions& options, const DeviceMesh& axis,
                                      const std::string& sentence) {
      const PipelineStage part([](const std::vector<Tensor>& x) { return x; }, parameters,
                               {.stage = stage, .num_stages = 2});
      EXPECT_THAT(failure_of([&] { Pipeline({part}, axis, options); }), HasSubstr(sentence));
      for (const auto& [name, tensor] : parameters) {
        EXPECT_EQ(failure_of([&, tensor = tensor] {
                    EXPECT_EQ(tensor.mean().item<double>(), world.rank() + 1) << sentence;
                  }),
                  "");
      }
      world.barrier();
    };
    // The replicas of one stage have parameters of different sizes.
    for (const bool is_sharded : {false, true}) {
      const bool is_other = world.rank() == 3;
      PipelineOptions options;
      if (is_sharded) {
        options.shards = mesh["dp"];
      } else {
        options.replicas = mesh.group("dp");
      }
      expect_unchanged({{"weight", weight_of({is_other ? 3 : 2})}}, options, mesh["pp"],
                       "Double (2) that requires grad on rank 0 and Double (3)");
    }
    // The axis of the shards and the axis of the pipeline belong to two different meshes.
    const DeviceMesh other(world, {{"pp", 2}, {"dp", 2}});
    expect_unchanged({{"weight", weight_of({2})}}, {.shards = other["dp"]}, mesh["pp"],
                     "must come from one mesh");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::pipeline_parameters_test
