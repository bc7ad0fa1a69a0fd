// An optimizer O whose step() updates shards inside of a ShardUpdate, which mapped shards require.
// With gathered shards, step() does the same as that of O.
//
//   cadre::FullyShardedDataParallel model{net, world, {.form = cadre::ShardForm::kMapped}};
//   cadre::ShardedOptimizer<cadre::AdamW> optimizer{model, torch::optim::AdamWOptions(3e-4)};
//
// Threads: as O. Blocking: the constructor, step() and load() wait until all ranks have called
// them. Errors: those of O and of ShardUpdate; kInvalidArgument on all ranks from the constructor
// in inference mode. step() throws kInvalidArgument on all ranks, before a shard is written, if
// parameter groups, options or step numbers of states differ between the ranks, or if a gradient is
// not reduced yet on any rank. If O::step() throws, mapped shards are unusable on all ranks,
// because they may be half written. torch::save() writes the state of this rank's shards and the
// rank number. torch::load() of another rank's file, or of a file that O rejects on any rank,
// throws on all ranks and changes no state. The parameters of O are ParameterShard::values of one
// wrapper, and other parameters of the program. O must be elementwise: its update of an element
// must not depend on other elements. Source: torch.optim with the sharded parameters of FSDP2.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/shard_fence.h"
#include "cadre/tensor/hooks/tensor_version.h"
#include "cadre/tensor/optim/saved_part.h"
#include "cadre/tensor/optim/state_loading.h"
#include "cadre/tensor/optim/state_tensors.h"

namespace cadre {

// A wrapper with one ShardFence for all its shards: FullyShardedDataParallel.
template <typename Model>
concept HasShardUpdates = requires(const Model& model) {
  {
    shard::WrapperAccess::shard_fence(model)
  } -> std::convertible_to<std::shared_ptr<shard::ShardFence>>;
  { model.parameters() } -> std::convertible_to<std::vector<at::Tensor>>;
};

template <typename T>
concept GroupsOfParameters =
    std::same_as<std::remove_cvref_t<T>, std::vector<torch::optim::OptimizerParamGroup>>;

template <typename O>
class ShardedOptimizer : public O {
  static_assert(std::is_base_of_v<torch::optim::Optimizer, O>,
                "cadre::ShardedOptimizer<O>: O must be an optimizer of torch::optim or of Cadre");
  static_assert(!std::is_base_of_v<torch::optim::LBFGS, O>,
                "cadre::ShardedOptimizer<O>: LBFGS uses sums over all elements of all parameters, "
                "and each rank has only its shard; use an optimizer that is elementwise");

 public:
  // Optimizes all parameters of the model. arguments: what O's constructor takes after the list of
  // parameters.
  template <HasShardUpdates Model, typename... Arguments>
    requires(!(GroupsOfParameters<Arguments> || ...))
  explicit ShardedOptimizer(const Model& model, Arguments&&... arguments)
      : ShardedOptimizer(shard::WrapperAccess::shard_fence(model), model.parameters(),
                         std::forward<Arguments>(arguments)...) {}
  // Optimizes groups of the model's parameters. A group may also contain other parameters of the
  // program.
  template <HasShardUpdates Model, typename... Arguments>
  ShardedOptimizer(const Model& model, const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   Arguments&&... arguments)
      : ShardedOptimizer(shard::WrapperAccess::shard_fence(model), groups,
                         std::forward<Arguments>(arguments)...) {}

  // The closure runs before the update, because during the update no parameter may be used.
  at::Tensor step(typename O::LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode with_grad(true);
      loss = closure();
    }
    check_has_fence();
    fence_->agree_on_step({.optimizer = c10::demangle_type<O>(),
                           .number = ++num_steps_,
                           .groups = this->param_groups(),
                           .state_mark_of = [this](const at::Tensor& leaf) {
                             return optim_state::mark_of_state<O>(*this, leaf);
                           }});
    shard::FencedUpdate update(fence_);
    O::step();
    update.finish();
    return loss;
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    O::save(archive);
    if constexpr (!optim_state::SavesPart<O>) {
      optim_state::write_part(archive, this->param_groups());
    }
  }
  // Each rank loads the archive that it has saved itself. Collective.
  void load(torch::serialize::InputArchive& archive) override {
    check_has_fence();
    optim_state::SetAside earlier(*this);
    fence_->check_on_all(kName, [&] {
      optim_state::check_part(archive, this->param_groups(), kName);
      O::load(archive);
    });
    earlier.keep_loaded();
  }

 private:
  static constexpr const char* kName = "cadre::ShardedOptimizer";

  // arguments: those of O's constructor. The parameters among them are shards whose updates `fence`
  // orders.
  template <typename... Arguments>
  explicit ShardedOptimizer(std::shared_ptr<shard::ShardFence> fence, Arguments&&... arguments)
      : O(std::forward<Arguments>(arguments)...), fence_(std::move(fence)) {
    const auto check = [] { wrap::refuse_inference_mode(kName); };
    fence_ ? fence_->check_on_all(kName, check) : check();
  }

  void check_has_fence() const {
    if (fence_) return;
    throw Error(ErrorCode::kInvalidArgument,
                "cadre::ShardedOptimizer: this optimizer has no shards, because it was moved from; "
                "use the optimizer that it was moved to");
  }

  std::shared_ptr<shard::ShardFence> fence_;  // shared with the FlatParameters of the wrapper
  int64_t num_steps_ = 0;
};

}  // namespace cadre
