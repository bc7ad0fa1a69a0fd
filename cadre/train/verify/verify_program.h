// The user's functions of a verification with their types. They compute a step in one process and
// on each rank.
//
// Threads: one. Lifetime: copies the functions. Errors: kInvalidArgument if the functions return
// invalid values; the exceptions of the functions.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/ddp/options.h"
#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/parallel/reduction/data_parallel_module.h"
#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/parallel/zero/options.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/train/verify/batch_rows.h"
#include "cadre/train/verify/reference_optimizer.h"
#include "cadre/train/verify/stepped_training.h"
#include "cadre/train/verify/strategy_case.h"
#include "cadre/train/verify/verification.h"

namespace cadre {

namespace verify {

// Returns the mean of the ranks' losses, weighted by their rows; a rank without rows has weight 0.
// Collective.
CADRE_EXPORT double mean_over_rows(double loss, int64_t rows, const ProcessGroup& world);

}  // namespace verify

struct VerifyOptions {
  int64_t num_steps = 5;
  // The generator gets this seed before each call of make_module().
  uint64_t seed = 0;
  // The dtype of the module and of the floating-point tensors of batches; by default unchanged.
  std::optional<c10::ScalarType> dtype = {};
  // Words that select cases: see select_strategy_cases(). Empty: all cases.
  std::vector<std::string> strategies = {};
  VerifyBounds bounds = {};
  // The maximum norm of all gradients together, to which each step clips them; nullopt: no
  // clipping.
  std::optional<double> clip_norm = {};
  // Used by fsdp and hsdp: says which ShardUnits are gathered and resharded as units. If empty, the
  // ShardUnits for which make_module() called fully_shard() are used.
  WrapPolicy wrap_policy = wrap_shard_units();
  // Is called on rank 0 with one line about what the verification is doing; may be an empty
  // function.
  std::function<void(std::string_view)> progress = {};
  // Gets each group that is meant for a wrapper, and returns the group that the wrapper uses. Tests
  // return one that injects faults.
  std::function<ProcessGroup(const ProcessGroup& group)> group_for = [](const ProcessGroup& group) {
    return group;
  };
};

// Lets a plain module be called in the way in which wrappers are called.
template <typename M>
class PlainModel {
 public:
  explicit PlainModel(std::shared_ptr<M> module) : module_(std::move(module)) {}

  template <typename... Args>
  auto operator()(Args&&... args) {
    return module_->forward(std::forward<Args>(args)...);
  }
  template <typename... Args>
  auto forward(Args&&... args) {
    return module_->forward(std::forward<Args>(args)...);
  }
  M* operator->() const { return module_.get(); }
  const std::shared_ptr<M>& module() const { return module_; }

 private:
  std::shared_ptr<M> module_;
};

template <typename Made>
struct MadeModule;
template <typename M>
struct MadeModule<std::shared_ptr<M>> {
  using Type = M;
  static std::shared_ptr<M> pointer_of(std::shared_ptr<M> made) { return made; }
};
template <ModuleHolder Holder>
struct MadeModule<Holder> {
  using Type = typename Holder::ContainedType;
  static std::shared_ptr<Type> pointer_of(const Holder& made) {
    return made.is_empty() ? nullptr : made.ptr();
  }
};

// Holds for functions that can be called as make_module() or make_module(group).
template <typename MakeModule>
concept MakesModule =
    std::invocable<MakeModule&> || std::invocable<MakeModule&, const ProcessGroup&>;

template <MakesModule MakeModule>
auto call_make_module(MakeModule& make_module, const ProcessGroup& group) {
  if constexpr (std::invocable<MakeModule&>) {
    return make_module();
  } else {
    return make_module(group);
  }
}

template <MakesModule MakeModule, typename MakeBatch, typename Loss, typename OptimizerOptions>
struct VerifyProgram {
  using Made =
      decltype(call_make_module(std::declval<MakeModule&>(), std::declval<const ProcessGroup&>()));
  using Module = typename MadeModule<Made>::Type;
  using Rows = std::remove_cvref_t<std::invoke_result_t<MakeBatch&, int64_t>>;
  using PlainOptimizer = typename verify::ReferenceOptimizer<OptimizerOptions>::Type;
  using RankOptimizer = typename OptimizerOf<OptimizerOptions>::Type;

  // `group` is the group of the training for which the module is made.
  std::shared_ptr<Module> module(const ProcessGroup& group) {
    at::manual_seed(options.seed);
    std::shared_ptr<Module> made =
        MadeModule<Made>::pointer_of(call_make_module(make_module, group));
    if (!made) {
      throw Error(ErrorCode::kInvalidArgument,
                  "verify_strategies: make_module() returned no module");
    }
    if (options.dtype) made->to(*options.dtype);
    return made;
  }

  Rows batch(int64_t step) {
    Rows rows = make_batch(step);
    return options.dtype ? verify::cast_batch(std::move(rows), *options.dtype) : rows;
  }

  // Returns the mean loss over `rows`, with its autograd graph.
  template <typename Model>
  at::Tensor loss_of(Model& model, const Rows& rows, const ProcessGroup& group) {
    const at::Tensor value = [&] {
      if constexpr (std::invocable<Loss&, Model&, const Rows&, const ProcessGroup&>) {
        return loss(model, rows, group);
      } else {
        return loss(model, rows);
      }
    }();
    if (value.defined() && value.numel() == 1 && value.requires_grad()) return value;
    throw Error(ErrorCode::kInvalidArgument,
                "verify_strategies: loss() must return a tensor of one element that depends on "
                "parameters: the mean loss of the rows it is given");
  }

  // Returns the forwards and backwards with which a rank of `world` computes a step whose global
  // batch has `num_rows` rows.
  verify::PlannedStep plan_step(const StrategyCase& strategy, int64_t /*step*/, int64_t num_rows,
                                const ProcessGroup& world) const {
    return verify::plan_even_step(num_rows, {.index = world.rank(), .count = world.world_size()},
                                  strategy.num_parts);
  }

  // Return the options of the wrapper and of the optimizer of a case.
  DistributedDataParallelOptions ddp_options(const StrategyCase& strategy) const {
    return {.gradients = strategy.strategy == DataStrategy::kZero2
                             ? GradientPlacement::kSharded
                             : GradientPlacement::kReplicated};
  }
  ZeroOptions zero_options() const { return {}; }
  FullyShardedDataParallelOptions fsdp_options(const StrategyCase& strategy) const {
    FullyShardedDataParallelOptions fsdp;
    fsdp.reshard = strategy.reshard;
    fsdp.form = strategy.form;
    if (strategy.reshard == Reshard::kOntoGroup) {
      fsdp.reshard_group_size = strategy.reshard_group_size;
    }
    fsdp.wrap_policy = options.wrap_policy;
    return fsdp;
  }

  // Returns the mean over the ranks of their losses of one backward, weighted by their rows; `own`
  // is the mean over this rank's `num_rows` rows. Collective.
  template <typename Wrapper>
  double mean_loss(Wrapper& /*model*/, const at::Tensor& own, int64_t num_rows,
                   const ProcessGroup& world) const {
    return verify::mean_over_rows(own.template item<double>(), num_rows, world);
  }

  // Return every parameter, and its gradient, as a whole tensor. Collective.
  template <typename Wrapper>
  std::vector<NamedTensor> gradients_of(Wrapper& model, const StrategyCase& strategy,
                                        const ProcessGroup& world) const {
    if (strategy.strategy < DataStrategy::kZero2) return verify::whole_gradients(*model.module());
    return shard::gather_gradients(model.parameter_shards(), world);
  }
  template <typename Wrapper>
  std::vector<NamedTensor> parameters_of(Wrapper& model, const StrategyCase& strategy,
                                         const ProcessGroup& /*world*/) const {
    if (!has_units(strategy.strategy)) return verify::whole_parameters(*model.module());
    return shard::gather_values(model.parameter_shards());
  }

  MakeModule make_module;
  MakeBatch make_batch;
  Loss loss;
  OptimizerOptions optimizer;
  VerifyOptions options;
};

}  // namespace cadre
