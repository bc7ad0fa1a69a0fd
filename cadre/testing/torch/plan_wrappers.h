// Makes the wrapper and the optimizer that a PlanOptions (the input of the memory planner)
// describes, and runs a step with them, to compare planned with measured memory.
//
// Threads: one for each rank. Blocking: collective, like the wrappers. Lifetime: the wrappers live
// as long as the call of with_planned_wrappers(). Errors: those of the wrappers.
#pragma once

#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/fsdp/shard_unit.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/parallel/plan/memory_plan.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/optim/optimizers.h"

namespace cadre::testing {

// A model for a comparison with a plan. Its sizes are odd, so that shards are padded. The root
// module itself has a vector, which is registered last.
inline constexpr int64_t kPlannedWidth = 301;

struct PlannedLayerImpl : torch::nn::Module {
  PlannedLayerImpl()
      : expand(register_module("expand", torch::nn::Linear(kPlannedWidth, kPlannedWidth))),
        shrink(register_module("shrink", torch::nn::Linear(kPlannedWidth, kPlannedWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return shrink(torch::relu(expand(x))); }
  torch::nn::Linear expand, shrink;
};

// Layer: PlannedLayerImpl or ShardUnit<PlannedLayerImpl>.
template <typename Layer>
struct PlannedNetOf : torch::nn::Module {
  PlannedNetOf() {
    for (int i = 0; i < 6; ++i) {
      layers.push_back(this->register_module(format("layer{}", i), std::make_shared<Layer>()));
    }
    last = register_parameter("last", torch::zeros({kPlannedWidth}));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) x = layer->forward(x);
    return x + last;
  }
  std::vector<std::shared_ptr<Layer>> layers;
  at::Tensor last;
};
using PlannedNet = PlannedNetOf<PlannedLayerImpl>;
using PlannedNetOfShardUnits = PlannedNetOf<ShardUnit<PlannedLayerImpl>>;

// Chooses the units of these models: their layers.
inline WrapPolicy planned_units() {
  return wrap_by_type<PlannedLayerImpl>();
}

// Sets caps that are smaller than PlannedNet, so that there are several buckets of gradients and of
// parameters.
inline void cap_buckets(PlanOptions& options) {
  options.bucket_caps = {.first_bytes = 100'000, .bytes = 700'000};
  options.zero_bucket_cap_bytes = 900'000;
}

inline FullyShardedDataParallelOptions sharding_of(const PlanOptions& options,
                                                   const WrapPolicy& policy) {
  FullyShardedDataParallelOptions sharding{
      .form = options.is_mapped ? ShardForm::kMapped : ShardForm::kGathered,
      .reshard = options.reshard,
      .reshard_root = options.reshard_root,
      .num_prefetched = options.num_prefetched};
  if (options.parameter_dtype) {
    sharding.precision.parameters = to_scalar_type(*options.parameter_dtype);
  }
  if (options.reduce_dtype) sharding.precision.reduce = to_scalar_type(*options.reduce_dtype);
  sharding.wrap_policy = policy;
  return sharding;
}

// Wraps `net`, whose units `policy` chooses, and calls use(model, optimizer, groups) with an AdamW
// for it. `groups` are all groups
// in which the wrappers run operations; the first one has all ranks.
template <typename Module, typename Use>
void with_planned_wrappers(const Module& net, const WrapPolicy& policy, const ProcessGroup& world,
                           const PlanOptions& options, const Use& use) {
  const torch::optim::AdamWOptions adamw(1e-3);
  const std::vector<ProcessGroup> all = {world};
  if (options.strategy == DataStrategy::kFsdp) {
    FullyShardedDataParallel model{net, world, sharding_of(options, policy)};
    ShardedOptimizer<AdamW> optimizer{model, adamw};
    return use(model, optimizer, all);
  }
  if (options.strategy == DataStrategy::kHsdp) {
    const DeviceMesh mesh(world, {{"replicate", options.num_replicas},
                                  {"shard", options.num_ranks / options.num_replicas}});
    FullyShardedDataParallel model{net, mesh, sharding_of(options, policy)};
    ShardedOptimizer<AdamW> optimizer{model, adamw};
    return use(model, optimizer,
               std::vector<ProcessGroup>{mesh.joint_group({"replicate", "shard"}),
                                         mesh.group("replicate"), mesh.group("shard")});
  }
  DistributedDataParallel model{
      net,
      world,
      {.bucket_caps = options.bucket_caps,
       .gradients = options.strategy == DataStrategy::kZero2 ? GradientPlacement::kSharded
                                                             : GradientPlacement::kReplicated}};
  if (options.strategy == DataStrategy::kZero1 || options.strategy == DataStrategy::kZero2) {
    ZeroRedundancyOptimizer<AdamW> optimizer{
        model, adamw, {.bucket_cap_bytes = options.zero_bucket_cap_bytes, .wait_in_step = true}};
    return use(model, optimizer, all);
  }
  AdamW optimizer{net->parameters(), adamw};
  use(model, optimizer, all);
}

// Runs the forwards and backwards of one step with gradient accumulation. All but the last run
// under no_sync().
template <typename Model, typename Optimizer>
void accumulate_gradients(Model& model, Optimizer& optimizer, const at::Tensor& x,
                          int64_t num_backwards) {
  optimizer.zero_grad();
  for (int64_t part = 1; part < num_backwards; ++part) {
    const auto guard = model.no_sync();
    (model(x) - 1).pow(2).mean().backward();
  }
  (model(x) - 1).pow(2).mean().backward();
}

}  // namespace cadre::testing
