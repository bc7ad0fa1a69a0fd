// Trains the models of wrap_models.h on ranks under every wrapper, and with every way to divide a
// batch among ranks and backwards.
//
// Threads: one for each rank. Blocking: collective, until the group's deadline. Errors: those of
// the wrappers. For tests only.
#pragma once

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/shard/data_strategy.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/torch/fsdp_training.h"
#include "cadre/testing/torch/wrap_bounds.h"

namespace cadre::testing {

// A way to place parameters, gradients and optimizer state, which a training combines with the
// other options.
struct Strategy {
  std::string name;
  DataStrategy sharding;
  FullyShardedDataParallelOptions fsdp = {};
  int num_replicas = 1;   // for kHsdp: the number of ranks that own the same shards
  bool has_units = true;  // is used by kFsdp and kHsdp; if false, all parameters belong to the root
  // Whether the ranks can map each other's memory. If not, mapped shards are gathered.
  bool shares_memory = true;
};

inline std::ostream& operator<<(std::ostream& out, const Strategy& strategy) {
  return out << strategy.name;
}

// Returns the strategies that are possible with this number of ranks.
inline std::vector<Strategy> all_strategies(int world_size) {
  std::vector<Strategy> strategies = {
      {"ddp", DataStrategy::kDdp},
      {"zero1", DataStrategy::kZero1},
      {"zero2", DataStrategy::kZero2},
      {"fsdp_after_forward", DataStrategy::kFsdp, {.reshard = Reshard::kAfterForward}},
      {"fsdp_root_too",
       DataStrategy::kFsdp,
       {.reshard_root = Reshard::kAfterForward, .num_prefetched = 0}},
      {"fsdp_after_backward", DataStrategy::kFsdp, {.reshard = Reshard::kAfterBackward}},
      {"fsdp_after_reduction",
       DataStrategy::kFsdp,
       {.reshard = Reshard::kAfterReduction, .reshard_root = Reshard::kAfterReduction}},
      {"fsdp_without_units",
       DataStrategy::kFsdp,
       {.reshard = Reshard::kAfterReduction, .num_prefetched = 0},
       /*num_replicas=*/1,
       /*has_units=*/false},
      {"fsdp_mapped", DataStrategy::kFsdp, {.form = ShardForm::kMapped}},
      {"fsdp_offload",
       DataStrategy::kFsdp,
       {.offload = FileOffload{.folder = std::filesystem::temp_directory_path().string()}}},
  };
  if (world_size == 4 || world_size == 8) {
    strategies.push_back({"fsdp_onto_group",
                          DataStrategy::kFsdp,
                          {.reshard = Reshard::kOntoGroup, .reshard_group_size = 2}});
    strategies.push_back({"hsdp", DataStrategy::kHsdp, {}, 2});
    strategies.push_back(
        {"hsdp_after_backward", DataStrategy::kHsdp, {.reshard = Reshard::kAfterBackward}, 2});
  }
  return strategies;
}

// The way in which the rows of a step are divided among ranks and backwards.
enum class Division : uint8_t {
  kWhole,   // each rank runs one forward and backward over its share
  kEmpty,   // the same, but in each step a different rank has no rows
  kNoSync,  // two backwards; the first, or in some steps both, run under no_sync()
  kSynced,  // two backwards, both of which reduce
};

inline const char* name_of(Division division) {
  switch (division) {
    case Division::kWhole:
      return "whole";
    case Division::kEmpty:
      return "empty";
    case Division::kNoSync:
      return "no_sync";
    case Division::kSynced:
      break;
  }
  return "synced";
}

struct ShardedCase {
  Case training;
  Division division = Division::kWhole;
  bool is_fused = true;  // true: Cadre's optimizer; false: libtorch's
};

inline std::ostream& operator<<(std::ostream& out, const ShardedCase& test_case) {
  return out << test_case.training << "_" << name_of(test_case.division)
             << (test_case.is_fused ? "_fused" : "_libtorch");
}

// Trainings for which this returns the same text must have equal bits; an empty text promises
// nothing.
inline std::string bits_class(const Strategy& strategy, const ShardedCase& test_case) {
  // With replicas of shards each gradient is reduced along each of two axes, which adds in another
  // order. libtorch's optimizers round the last elements of a slice differently.
  if (strategy.num_replicas > 1 || !test_case.is_fused) return "";
  if (test_case.division != Division::kSynced) return "all";
  // Sharded gradients add up means, while replicated gradients average the sum again: see
  // docs/guide/parallel/data-parallel.md.
  return strategy.sharding <= DataStrategy::kZero1 ? "replicated" : "sharded";
}

// Changes the group that carries gradients and parameters, for example to make it slow.
using Disturbance = std::function<void(const FakeGroup& group)>;

// Returns the rows of one rank in one part of a step's batch.
inline Share rows_of(const ShardedCase& test_case, size_t step, Share part,
                     const ProcessGroup& group) {
  const int world_size = group.world_size();
  int rank = group.rank();
  int num_sharing = world_size;
  if (test_case.division == Division::kEmpty && world_size > 1) {
    const int empty = static_cast<int>(step % static_cast<size_t>(world_size));
    if (rank == empty) return {part.begin, part.begin};
    if (rank > empty) --rank;
    --num_sharing;
  }
  const Share share = share_of(part.size(), rank, num_sharing);
  return {part.begin + share.begin, part.begin + share.end};
}

// Runs the forwards and backwards of one step. The loss is the mean over the batch, which is
// returned.
template <typename Wrapper>
double run_step(const ShardedCase& test_case, size_t step, const Tensor& batch, Wrapper& wrapper,
                Model& model, const ProcessGroup& group) {
  const int64_t num_rows = batch.size(0);
  std::vector<Share> parts = {{0, num_rows}};
  const bool is_local = test_case.division == Division::kNoSync;
  if (is_local || test_case.division == Division::kSynced) {
    parts = {{0, num_rows / 2}, {num_rows / 2, num_rows}};
  }
  int64_t num_own = 0;
  for (const Share& part : parts) num_own += rows_of(test_case, step, part, group).size();
  // All backwards that reduce in one step need the same share of the rows.
  const bool is_even = num_rows % (2 * group.world_size()) == 0;
  const bool is_reduced_at_end = is_local && (!is_even || step % 2 == 0);
  double mean = 0;
  for (size_t k = 0; k < parts.size(); ++k) {
    const Share own = rows_of(test_case, step, parts[k], group);
    const Tensor rows = batch.narrow(0, own.begin, own.size());
    const auto run = [&] {
      const Tensor loss = model.loss(wrapper(rows), rows);
      double share = 1;
      if (is_local) share = static_cast<double>(own.size()) / static_cast<double>(num_own);
      if (test_case.division == Division::kSynced) {
        share = static_cast<double>(parts[k].size()) / static_cast<double>(num_rows);
      }
      (loss * share).backward();
      return loss;
    };
    Tensor loss;
    if (is_local && (k == 0 || is_reduced_at_end)) {
      const auto guard = wrapper.no_sync();
      loss = run();
    } else {
      loss = run();
    }
    mean += wrapper.mean_over_ranks(loss) * static_cast<double>(parts[k].size()) /
            static_cast<double>(num_rows);
  }
  if (is_reduced_at_end) wrapper.reduce_gradients();
  return mean;
}

// Assembles tensors of which each rank owns parts.
template <typename Wrapper, typename Part>
Snapshot whole_of(const Wrapper& wrapper, const Part& part) {
  Snapshot tensors;
  for (const ParameterShard& shard : wrapper.parameter_shards()) {
    tensors.push_back(
        assembled(shard, part(shard),
                  shard.mesh.group(shard.flat_axis.value_or(shard.mesh.axes().back().name))));
  }
  return tensors;
}

template <typename Wrapper>
Training train_with(const Strategy& strategy, const ShardedCase& test_case,
                    const std::vector<Tensor>& batches, const ProcessGroup& group, Wrapper& wrapper,
                    torch::optim::Optimizer& optimizer) {
  Model& model = *wrapper.module();
  const bool has_shards = strategy.sharding >= DataStrategy::kZero2;
  Training training;
  for (size_t step = 0; step < batches.size(); ++step) {
    optimizer.zero_grad();
    training.losses.push_back(run_step(test_case, step, batches[step], wrapper, model, group));
    training.gradients.push_back(
        has_shards
            ? whole_of(wrapper, [](const ParameterShard& shard) { return shard.values.grad(); })
            : gradients_of(model));
    optimizer.step();
  }
  training.parameters =
      has_shards ? whole_of(wrapper, [](const ParameterShard& shard) { return shard.values; })
                 : copies_of(parameters_of(model));
  return training;
}

// Calls `call` with the type of the optimizer and with its options.
template <typename Call>
auto with_optimizer(const ShardedCase& test_case, const Call& call) {
  if (test_case.training.optimizer == "sgd") {
    return test_case.is_fused ? call(std::type_identity<SGD>(), sgd_options())
                              : call(std::type_identity<torch::optim::SGD>(), sgd_options());
  }
  return test_case.is_fused ? call(std::type_identity<AdamW>(), adamw_options())
                            : call(std::type_identity<torch::optim::AdamW>(), adamw_options());
}

inline ProcessGroup disturbed(const ProcessGroup& group, const Disturbance& disturb) {
  const FakeGroup fake(group);
  disturb(fake);
  return fake.group();
}

inline Training train_replicated(const Strategy& strategy, const ShardedCase& test_case,
                                 const std::vector<Tensor>& batches, const ProcessGroup& group,
                                 const std::shared_ptr<Model>& module, const Disturbance& disturb) {
  const auto element_bytes = static_cast<int64_t>(torch::elementSize(test_case.training.dtype));
  // The caps are small, so that each model has several buckets.
  DistributedDataParallelOptions options{
      .bucket_caps = {.first_bytes = 64 * element_bytes, .bytes = 256 * element_bytes}};
  if (strategy.sharding == DataStrategy::kZero2) options.gradients = GradientPlacement::kSharded;
  DistributedDataParallel<Model> wrapper(module, disturb ? disturbed(group, disturb) : group,
                                         options);
  return with_optimizer(test_case, [&]<typename O>(std::type_identity<O>, const auto& defaults) {
    if (strategy.sharding == DataStrategy::kDdp) {
      O optimizer(parameters_of(*module), defaults);
      return train_with(strategy, test_case, batches, group, wrapper, optimizer);
    }
    ZeroRedundancyOptimizer<O> optimizer(
        wrapper, defaults,
        ZeroOptions{.bucket_cap_bytes = 250 * element_bytes, .wait_in_step = true});
    return train_with(strategy, test_case, batches, group, wrapper, optimizer);
  });
}

inline parallel::ShardGroups groups_of(const Strategy& strategy, const ProcessGroup& group,
                                       const Disturbance& disturb) {
  const auto shard_size = group.world_size() / strategy.num_replicas;
  parallel::ShardGroups groups =
      strategy.num_replicas == 1
          ? parallel::ShardGroups::of(group)
          : parallel::ShardGroups::of(
                DeviceMesh(group, {{"replicate", strategy.num_replicas}, {"shard", shard_size}}));
  if (!disturb) return groups;
  groups.all = disturbed(group, disturb);
  if (groups.shard) groups.shard = disturbed(groups.mesh.group("shard"), disturb);
  if (groups.replicate) groups.replicate = disturbed(groups.mesh.group("replicate"), disturb);
  return groups;
}

inline Training train_fully_sharded(const Strategy& strategy, const ShardedCase& test_case,
                                    const std::vector<Tensor>& batches, const ProcessGroup& group,
                                    const std::shared_ptr<Model>& module,
                                    const Disturbance& disturb) {
  const parallel::ShardGroups groups = groups_of(strategy, group, disturb);
  FullyShardedDataParallelOptions options = strategy.fsdp;
  if (strategy.has_units) options.wrap_policy = wrap_by_size(1);
  Training training;
  {
    FullyShardedDataParallel<Model> wrapper{module, groups, options};
    const ShardForm form = strategy.shares_memory ? options.form : ShardForm::kGathered;
    require(wrapper.form() == form, strategy.name + ": the form of the shards");
    training =
        with_optimizer(test_case, [&]<typename O>(std::type_identity<O>, const auto& defaults) {
          ShardedOptimizer<O> optimizer(wrapper, defaults);
          return train_with(strategy, test_case, batches, group, wrapper, optimizer);
        });
  }
  groups.mesh.close();
  return training;
}

// Trains on one rank. All ranks call it, each with its own module.
inline Training train_under(const Strategy& strategy, const ShardedCase& test_case,
                            const std::vector<Tensor>& batches, const ProcessGroup& group,
                            const std::shared_ptr<Model>& module, const Disturbance& disturb = {}) {
  const auto train = has_units(strategy.sharding) ? train_fully_sharded : train_replicated;
  return train(strategy, test_case, batches, group, module, disturb);
}

}  // namespace cadre::testing
