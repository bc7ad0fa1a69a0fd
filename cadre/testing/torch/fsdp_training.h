// Functions that train under FullyShardedDataParallel in its equality tests, and that assemble
// whole tensors from the shards of the ranks.
//
// Threads: train_sharded() makes one for each rank. Blocking: until all ranks have ended. Errors:
// if a rank fails, the test fails.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/testing/torch/fsdp_models.h"
#include "cadre/testing/torch/wrap_training.h"

namespace cadre::testing {

// Assembles a whole tensor from the ranges that the ranks of the group own, bitwise exactly: sums
// the bytes of zero-filled copies, in which the ranges do not overlap. Returns an undefined tensor
// if this rank's `own` is undefined. Collective.
inline Tensor assembled(const ParameterShard& shard, const Tensor& own, const ProcessGroup& group) {
  if (!own.defined()) return {};
  if (!shard.flat_axis) return own.detach().clone().view(shard.sizes);
  const Tensor whole = torch::zeros(shard.sizes, own.options());
  whole.view(-1).narrow(0, shard.range.begin, shard.range.size()).copy_(own.detach());
  group.all_reduce(whole.view(-1).view(torch::kByte));
  return whole;
}

template <typename M>
Snapshot assembled_gradients(const FullyShardedDataParallel<M>& model, const ProcessGroup& group) {
  Snapshot gradients;
  for (const ParameterShard& shard : model.parameter_shards()) {
    gradients.push_back(assembled(shard, shard.values.grad(), group));
  }
  return gradients;
}

template <typename M>
Snapshot assembled_parameters(const FullyShardedDataParallel<M>& model, const ProcessGroup& group) {
  Snapshot parameters;
  for (const ParameterShard& shard : model.parameter_shards()) {
    parameters.push_back(assembled(shard, shard.values, group));
  }
  return parameters;
}

// Returns options with which every ShardUnit becomes a unit, whatever its size.
inline FullyShardedDataParallelOptions all_units(const Case& test_case, int world_size) {
  return {.wrap_policy = wrap_shard_units(),
          .weighting = test_case.batch % world_size == 0 ? GradientWeighting::kEqual
                                                         : GradientWeighting::kSamples};
}

// Trains on one rank; all ranks call it.
inline Training train_sharded_rank(const Case& test_case, const std::vector<Tensor>& batches,
                                   const ProcessGroup& group, const std::shared_ptr<Model>& module,
                                   const FullyShardedDataParallelOptions& options) {
  FullyShardedDataParallel model{module, group, options};
  const auto optimizer = make_optimizer(test_case, model.parameters());
  const Share share = share_of(test_case.batch, group.rank(), group.world_size());
  Training training;
  for (const Tensor& batch : batches) {
    const Tensor rows = batch.narrow(0, share.begin, share.size());
    optimizer->zero_grad();
    if (options.weighting == GradientWeighting::kSamples) model.set_num_samples(share.size());
    module->loss(model(rows), rows).backward();
    training.gradients.push_back(assembled_gradients(model, group));
    optimizer->step();
  }
  training.parameters = assembled_parameters(model, group);
  return training;
}

// Trains on ranks as threads, whose modules start with different weights. Returns the results,
// indexed by rank.
inline std::vector<Training> train_sharded(const Case& test_case,
                                           const std::vector<Tensor>& batches, uint64_t seed,
                                           int world_size,
                                           const FullyShardedDataParallelOptions& options) {
  std::vector<std::shared_ptr<Model>> models;
  for (int rank = 0; rank < world_size; ++rank) {
    models.push_back(make_unit_model(test_case, seed + static_cast<uint64_t>(rank)));
  }
  std::vector<Training> trained(static_cast<size_t>(world_size));
  const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
    trained[group.rank()] =
        train_sharded_rank(test_case, batches, group, models[group.rank()], options);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return trained;
}

}  // namespace cadre::testing
