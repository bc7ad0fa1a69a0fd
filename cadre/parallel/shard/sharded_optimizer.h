// An optimizer whose step() is an update of shards: the only step that mapped shards allow. On
// gathered ones it does what O does.
//
//   cadre::FullyShardedDataParallel model{net, world, {.form = cadre::ShardForm::kMapped}};
//   cadre::ShardedOptimizer<cadre::AdamW> optimizer{model, torch::optim::AdamWOptions(3e-4)};
//
// Threads: as O. Blocking: the constructor, step() and load(), until the other ranks call them,
// too. Lifetime: shares what guards the shards. Errors: those of O and of ShardUpdate;
// kInvalidArgument on all ranks from the constructor in inference mode. step() throws
// kInvalidArgument on all ranks, before anything is written, where groups, options or the steps of
// states differ between the ranks, or a gradient of one of them waits for its reduction. A step
// that throws in O leaves mapped shards unusable on all ranks, because some elements may have been
// updated and others not. torch::save() writes the state of this rank's shards, and which rank owns
// them; torch::load() of another rank's file, or of one that O refuses on any rank, throws on all
// ranks and changes nothing. The parameters of O are the shards of one wrapper,
// ParameterShard::values, and other parameters of the program. O is elementwise: its update of an
// element depends on no other element. Source: torch.optim over sharded parameters, as FSDP2 uses
// it.
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

// A wrapper whose shards are written together, in one update: FullyShardedDataParallel.
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
  // Optimizes all parameters of the model. arguments: the arguments of O's constructor after the
  // parameters.
  template <HasShardUpdates Model, typename... Arguments>
    requires(!(GroupsOfParameters<Arguments> || ...))
  explicit ShardedOptimizer(const Model& model, Arguments&&... arguments)
      : ShardedOptimizer(shard::WrapperAccess::shard_fence(model), model.parameters(),
                         std::forward<Arguments>(arguments)...) {}
  // Optimizes groups of these parameters, which may also have other parameters of the program.
  template <HasShardUpdates Model, typename... Arguments>
  ShardedOptimizer(const Model& model, const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   Arguments&&... arguments)
      : ShardedOptimizer(shard::WrapperAccess::shard_fence(model), groups,
                         std::forward<Arguments>(arguments)...) {}

  // The closure runs before the update, because it uses the parameters.
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
  // Collective: each rank loads the archive that it has saved.
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

  // `arguments` are those of O's constructor; its parameters are leaves of this fence.
  template <typename... Arguments>
  explicit ShardedOptimizer(std::shared_ptr<shard::ShardFence> fence, Arguments&&... arguments)
      : O(std::forward<Arguments>(arguments)...), fence_(std::move(fence)) {
    const auto check = [] { wrap::refuse_inference_mode(kName); };
    fence_ ? fence_->check_on_all(kName, check) : check();
  }

  void check_has_fence() const {
    if (fence_) return;
    throw Error(ErrorCode::kInvalidArgument,
                "cadre::ShardedOptimizer: it has no shards, because it was moved from; use the "
                "object that it was moved to");
  }

  std::shared_ptr<shard::ShardFence> fence_;  // the FlatParameters share it
  int64_t num_steps_ = 0;
};

}  // namespace cadre
