// Trains the models of wrap_models.h on several ranks under each data-parallel strategy, and with
// each way to divide a batch among ranks and backwards. The trainings are those of
// cadre/train/verify.
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

#include "cadre/parallel/shard/data_strategy.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/torch/fsdp_training.h"
#include "cadre/testing/torch/wrap_bounds.h"
#include "cadre/train/verify/trainings.h"

namespace cadre::testing {

// A data-parallel strategy with its options: how parameters, gradients and optimizer state are
// placed on the ranks.
struct Strategy {
  std::string name;
  DataStrategy sharding;
  FullyShardedDataParallelOptions fsdp = {};
  // The number of ranks that own the same shard. Used by kHsdp.
  int num_replicas = 1;
  // Whether the model is divided into units. If not, all parameters belong to the root. Used by
  // kFsdp and kHsdp.
  bool has_units = true;
  // Whether the ranks can map each other's memory. If not, mapped shards are gathered.
  bool shares_memory = true;

  StrategyCase strategy_case() const {
    return {.strategy = sharding, .form = fsdp.form, .num_replicas = num_replicas};
  }
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
  kWhole,   // each rank runs one forward and backward over its rows
  kEmpty,   // like kWhole, but in each step a different rank has no rows
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

// Returns the name of a set of trainings: all trainings of one set must have bitwise equal results.
// Returns "" for a training without such a promise.
inline std::string bits_class(const Strategy& strategy, const ShardedCase& test_case) {
  // hsdp reduces each gradient along two axes, one after the other, which changes the order of
  // additions. libtorch's optimizers round the last elements of a slice differently.
  if (strategy.num_replicas > 1 || !test_case.is_fused) return "";
  if (test_case.division != Division::kSynced) return "all";
  // If both backwards of a step reduce, sharded gradients accumulate the reduced means, while
  // replicated gradients are averaged again with the first mean in them: see
  // docs/guide/parallel/data-parallel.md.
  return strategy.sharding <= DataStrategy::kZero1 ? "replicated" : "sharded";
}

// Changes the group in which gradients and parameters are exchanged, for example to make it slow.
using Disturbance = std::function<void(const FakeGroup& group)>;

// Returns the rows of this rank in one part of a step's batch.
inline FlatRange rows_of(const ShardedCase& test_case, int64_t step, const FlatRange& part,
                         const ProcessGroup& group) {
  verify::RowsPart own{.index = group.rank(), .count = group.world_size()};
  if (test_case.division == Division::kEmpty && own.count > 1) {
    const int64_t empty = (step - 1) % own.count;
    if (own.index == empty) return {part.begin, part.begin};
    if (own.index > empty) --own.index;
    --own.count;
  }
  return verify::rows_of_part(part, own);
}

// Returns which rows this rank uses in each backward of a step. The loss of the step is the mean
// over `num_rows` rows of all ranks.
inline verify::PlannedStep plan_of(const ShardedCase& test_case, int64_t step, int64_t num_rows,
                                   const ProcessGroup& group) {
  const bool is_local = test_case.division == Division::kNoSync;
  const bool is_synced = test_case.division == Division::kSynced;
  std::vector<FlatRange> parts = {{0, num_rows}};
  if (is_local || is_synced) parts = {{0, num_rows / 2}, {num_rows / 2, num_rows}};
  // Whether every rank has the same number of rows in both backwards. If not, a step with no_sync()
  // reduces only once, at its end.
  const bool is_even = num_rows % (2 * group.world_size()) == 0;
  verify::PlannedStep plan{.is_reduced_at_end = is_local && (!is_even || step % 2 == 1)};
  int64_t num_own = 0;
  for (const FlatRange& part : parts) {
    const FlatRange own = rows_of(test_case, step, part, group);
    num_own += own.size();
    plan.backwards.push_back(
        {.rows = own,
         .share_of_batch = static_cast<double>(part.size()) / static_cast<double>(num_rows)});
  }
  for (size_t k = 0; k < parts.size(); ++k) {
    verify::PlannedBackward& backward = plan.backwards[k];
    backward.is_local = is_local && (k == 0 || plan.is_reduced_at_end);
    if (is_local) {
      backward.weight = static_cast<double>(backward.rows.size()) / static_cast<double>(num_own);
    } else if (is_synced) {
      backward.weight = backward.share_of_batch;
    }
  }
  return plan;
}

inline ProcessGroup disturbed(const ProcessGroup& group, const Disturbance& disturb) {
  const FakeGroup fake(group);
  disturb(fake);
  return fake.group();
}

// A program for the trainings of cadre/train/verify (see verify_program.h): trains the given model
// with an optimizer of type O.
template <typename O, typename Defaults>
struct ShardedProgram {
  using Module = Model;
  using RankOptimizer = O;

  std::shared_ptr<Model> module(const ProcessGroup& /*group*/) const { return model; }
  Tensor batch(int64_t step) const { return batches[static_cast<size_t>(step - 1)]; }

  template <typename Wrapper>
  Tensor loss_of(Wrapper& wrapper, const Tensor& rows, const ProcessGroup& /*group*/) const {
    if constexpr (requires { wrapper.form(); }) {
      const ShardForm form = strategy.shares_memory ? strategy.fsdp.form : ShardForm::kGathered;
      require(wrapper.form() == form, strategy.name + ": the shards have another form");
    }
    return model->loss(wrapper(rows), rows);
  }

  verify::PlannedStep plan_step(const StrategyCase& /*strategy*/, int64_t step, int64_t num_rows,
                                const ProcessGroup& world) const {
    return plan_of(test_case, step, num_rows, world);
  }

  // The bucket caps are small, so that each model has several buckets.
  DistributedDataParallelOptions ddp_options(const StrategyCase& given) const {
    DistributedDataParallelOptions ddp{
        .bucket_caps = {.first_bytes = 64 * element_bytes(), .bytes = 256 * element_bytes()}};
    if (given.strategy == DataStrategy::kZero2) ddp.gradients = GradientPlacement::kSharded;
    return ddp;
  }
  ZeroOptions zero_options() const {
    return {.bucket_cap_bytes = 250 * element_bytes(), .wait_in_step = true};
  }
  FullyShardedDataParallelOptions fsdp_options(const StrategyCase& /*strategy*/) const {
    FullyShardedDataParallelOptions fsdp = strategy.fsdp;
    if (strategy.has_units) fsdp.wrap_policy = wrap_shard_units();
    return fsdp;
  }

  // The loss goes through the wrapper, whose collective runs while those of sharded parameters and
  // gradients may be in flight.
  template <typename Wrapper>
  double mean_loss(Wrapper& wrapper, const Tensor& loss, int64_t /*num_rows*/,
                   const ProcessGroup& /*world*/) const {
    return wrapper.mean_over_ranks(loss);
  }

  // Shards are assembled by sums of their bytes, so that an element with two owners, and a gradient
  // that only some ranks have, are noticed.
  template <typename Wrapper>
  std::vector<NamedTensor> gradients_of(Wrapper& wrapper, const StrategyCase& given,
                                        const ProcessGroup& /*world*/) const {
    if (given.strategy < DataStrategy::kZero2) return verify::whole_gradients(*model);
    return assembled_shards(wrapper,
                            [](const ParameterShard& shard) { return shard.values.grad(); });
  }
  template <typename Wrapper>
  std::vector<NamedTensor> parameters_of(Wrapper& wrapper, const StrategyCase& given,
                                         const ProcessGroup& /*world*/) const {
    if (given.strategy < DataStrategy::kZero2) return verify::whole_parameters(*model);
    return assembled_shards(wrapper, [](const ParameterShard& shard) { return shard.values; });
  }
  template <typename Wrapper, typename Part>
  static std::vector<NamedTensor> assembled_shards(Wrapper& wrapper, const Part& part) {
    std::vector<NamedTensor> tensors;
    for (const ParameterShard& shard : wrapper.parameter_shards()) {
      const std::string axis = shard.flat_axis.value_or(shard.mesh.axes().back().name);
      tensors.push_back({shard.name, assembled(shard, part(shard), shard.mesh.group(axis))});
    }
    return tensors;
  }

  int64_t element_bytes() const {
    return static_cast<int64_t>(torch::elementSize(test_case.training.dtype));
  }

  const Strategy& strategy;
  const ShardedCase& test_case;
  const std::vector<Tensor>& batches;
  std::shared_ptr<Model> model;
  Defaults optimizer;
  VerifyOptions options;
};

// Calls `call` with the optimizer class of the test case, as a template argument, and its options.
template <typename Call>
auto with_optimizer(const ShardedCase& test_case, const Call& call) {
  if (test_case.training.optimizer == "sgd") {
    return test_case.is_fused ? call(std::type_identity<SGD>(), sgd_options())
                              : call(std::type_identity<torch::optim::SGD>(), sgd_options());
  }
  return test_case.is_fused ? call(std::type_identity<AdamW>(), adamw_options())
                            : call(std::type_identity<torch::optim::AdamW>(), adamw_options());
}

// Trains on this rank under the strategy. All ranks call it, each with its own module.
inline Training train_under(const Strategy& strategy, const ShardedCase& test_case,
                            const std::vector<Tensor>& batches, const ProcessGroup& group,
                            const std::shared_ptr<Model>& module, const Disturbance& disturb = {}) {
  const std::vector<std::string> names = parameter_names_of(*module);
  VerifyOptions options;
  if (disturb) {
    options.group_for = [&](const ProcessGroup& given) { return disturbed(given, disturb); };
  }
  return with_optimizer(test_case, [&]<typename O, typename Defaults>(std::type_identity<O>,
                                                                      const Defaults& defaults) {
    const auto program = std::make_shared<ShardedProgram<O, Defaults>>(ShardedProgram<O, Defaults>{
        strategy, test_case, batches, module, defaults, std::move(options)});
    const auto training = verify::make_wrapped_training(program, group, strategy.strategy_case());
    return train_in_steps(*training, names, batches.size());
  });
}

}  // namespace cadre::testing
