// Tests every class that trains a module: it must throw if it is constructed in inference mode, or
// with a module that was constructed in that mode. The error on all ranks names the class or the
// tensor, and the module stays unchanged.
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/layers/linear.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/parallel/tp/parallelize_module.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/rank_expectations.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;
namespace nn = torch::nn;

struct Net : nn::Module {
  Net() {
    in = register_module("in", Linear(4, 4));
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : parameters()) parameter.fill_(0.25);
  }
  Tensor forward(const Tensor& x) { return in(x); }
  Linear in{nullptr};
};

using Make = std::function<void(const std::shared_ptr<Net>&, const ProcessGroup&)>;

struct Wrapping {
  std::string name;  // the name of the class that the error must contain
  // If the module is made in inference mode: the tensor of the module that the error must name.
  std::string tensor;
  Make make;
};

std::vector<Wrapping> wrappings() {
  const auto fsdp = [](FullyShardedDataParallelOptions options) -> Make {
    return [options](const std::shared_ptr<Net>& net, const ProcessGroup& group) {
      FullyShardedDataParallel<Net> model(net, group, options);
    };
  };
  const auto ddp = [](GradientPlacement gradients) -> Make {
    return [gradients](const std::shared_ptr<Net>& net, const ProcessGroup& group) {
      DistributedDataParallel<Net> model(net, group, {.gradients = gradients});
    };
  };
  return {
      {"DistributedDataParallel", "in.weight", ddp(GradientPlacement::kReplicated)},
      {"DistributedDataParallel", "in.weight", ddp(GradientPlacement::kSharded)},
      {"FullyShardedDataParallel", "in.weight", fsdp({.form = ShardForm::kGathered})},
      {"FullyShardedDataParallel", "in.weight", fsdp({.form = ShardForm::kMapped})},
      {"cadre::ZeroRedundancyOptimizer", "in.weight",
       [](const std::shared_ptr<Net>& net, const ProcessGroup& group) {
         ZeroRedundancyOptimizer<AdamW> zero(net->named_parameters(), group,
                                             torch::optim::AdamWOptions());
       }},
      {"dividing \"in\"", "weight",
       [](const std::shared_ptr<Net>& net, const ProcessGroup& group) {
         const DeviceMesh mesh(group, {{"tp", group.world_size()}});
         parallelize_module(*net, mesh, {{"in", ParallelStyle::kColwise}});
       }},
      {"cadre::Pipeline", "in.weight",
       [](const std::shared_ptr<Net>& net, const ProcessGroup& group) {
         const PipelineStageOptions place{.stage = group.rank(), .num_stages = group.world_size()};
         Pipeline pipeline({PipelineStage(net, place)}, group);
       }},
  };
}

// Returns the error of both ranks. Only rank 1 constructs the object in inference mode or, with
// is_of_module, passes a module that was made in that mode.
std::string refusal_of(const Make& make, bool is_of_module) {
  return testing::refusal_of_both_ranks(
      [&](const ProcessGroup& group) {
        const c10::InferenceMode mode(is_of_module && group.rank() == 1);
        return std::make_shared<Net>();
      },
      [&](const std::shared_ptr<Net>& net, const ProcessGroup& group) {
        const c10::InferenceMode mode(!is_of_module && group.rank() == 1);
        make(net, group);
      });
}

TEST(InferenceMode, NoWrapperIsConstructedInIt) {
  for (const auto& [name, tensor, make] : wrappings()) {
    EXPECT_THAT(refusal_of(make, /*is_of_module=*/false),
                AllOf(HasSubstr("kInvalidArgument: "), HasSubstr(name),
                      HasSubstr("is constructed in inference mode"),
                      HasSubstr("construct it outside of c10::InferenceMode")))
        << name;
  }
}

TEST(InferenceMode, NoWrapperTakesAModuleOfIt) {
  for (const auto& [name, tensor, make] : wrappings()) {
    EXPECT_THAT(refusal_of(make, /*is_of_module=*/true),
                AllOf(HasSubstr("kInvalidArgument: "), HasSubstr(tensor),
                      HasSubstr("was made in inference mode and cannot be trained")))
        << name;
  }
}

TEST(InferenceMode, NoShardedOptimizerIsConstructedInIt) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    FullyShardedDataParallel<Net> model(std::make_shared<Net>(), group);
    output = failure_of([&] {
      const c10::InferenceMode mode(group.rank() == 1);
      ShardedOptimizer<torch::optim::Adagrad> optimizer(model, 0.1);
    });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("cadre::ShardedOptimizer: it is constructed in inference"));
  }
}

}  // namespace
}  // namespace cadre
