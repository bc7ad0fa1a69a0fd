// Trains the models of wrap_models.h on ranks under every wrapper, and with every way to divide a
// batch among ranks and backwards. The trainings are those of cadre/train/verify.
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

// Returns the backwards of one rank in a step whose loss is the mean over `num_rows` rows.
inline verify::PlannedStep plan_of(const ShardedCase& test_case, int64_t step, int64_t num_rows,
                                   const ProcessGroup& group) {
  const bool is_local = test_case.division == Division::kNoSync;
  const bool is_synced = test_case.division == Division::kSynced;
  std::vector<FlatRange> parts = {{0, num_rows}};
  if (is_local || is_synced) parts = {{0, num_rows / 2}, {num_rows / 2, num_rows}};
  // All backwards that reduce in one step need the same share of the rows.
  const bool is_even = num_rows % (2 * group.world_size()) == 0;
  verify::PlannedStep plan{.is_reduced_at_end = is_local && (!is_even || step % 2 == 1)};
  int64_t num_own = 0;
  for (const FlatRange& part : parts) {
    const FlatRange own = rows_of(test_case, step, part, group);
    num_own += own.size();
    plan.backwards.push_back({.rows = own});
  }
  for (size_t k = 0; k < parts.size(); ++k) {
    verify::PlannedBackward& backward = plan.backwards[k];
    backward.is_local = is_local && (k == 0 || plan.is_reduced_at_end);
    if (is_local) {
      backward.weight = static_cast<double>(backward.rows.size()) / static_cast<double>(num_own);
    } else if (is_synced) {
      backward.weight = static_cast<double>(parts[k].size()) / static_cast<double>(num_rows);
    }
  }
  return plan;
}

inline ProcessGroup disturbed(const ProcessGroup& group, const Disturbance& disturb) {
  const FakeGroup fake(group);
  disturb(fake);
  return fake.group();
}

// The program of a verification (see verify/verify_program.h) that trains a given model with an
// optimizer of type O.
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
      require(wrapper.form() == form, strategy.name + ": the form of the shards");
    }
    return model->loss(wrapper(rows), rows);
  }

  verify::PlannedStep plan_step(const StrategyCase& /*strategy*/, int64_t step, int64_t num_rows,
                                const ProcessGroup& world) const {
    return plan_of(test_case, step, num_rows, world);
  }

  // The caps are small, so that each model has several buckets.
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
    if (strategy.has_units) fsdp.wrap_policy = wrap_by_size(1);
    return fsdp;
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

// Trains on one rank. All ranks call it, each with its own module.
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
