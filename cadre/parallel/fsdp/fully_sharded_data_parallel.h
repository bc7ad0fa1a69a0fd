// Trains a model whose parameters, gradients and optimizer state are sharded over the ranks, like
// PyTorch's FSDP2. A unit is a module whose parameters are gathered together, before the unit
// computes, and freed afterwards.
//
//   cadre::FullyShardedDataParallel model{
//       gpt, world, {.wrap_policy = cadre::wrap_by_type<BlockImpl>()}};  // or a DeviceMesh
//   cadre::ShardedOptimizer<cadre::AdamW> optimizer{model, torch::optim::AdamWOptions(3e-4)};
//   ...
//   optimizer.zero_grad();
//   loss_of(model(rows)).backward();  // reduce_scatters the gradients
//   optimizer.step();                 // each rank updates its shards
//
// With gathered shards (ShardForm::kGathered) an optimizer of torch::optim that is made from
// model.parameters() works, too. Parameters outside of all units form one more unit, the root's.
// Parameters have the same names as in the plain module. docs/guide/parallel/fsdp.md describes
// units, resharding, memory and errors.
//
// Threads: forward, backward and all methods of one wrapper must be called from the same thread;
// another wrapper may use another thread. Blocking: the constructor, forward, backward and
// summon_full_params() are collectives and wait until the group's deadline. Lifetime: shares the
// module and keeps the group alive. The parameters stay sharded after the wrapper's destruction.
// The methods of a wrapper that was moved from throw kInvalidArgument. Errors: cadre::Error; an
// access to a sharded parameter throws c10::Error, whose text says what to do. Source:
// torch.distributed.fsdp; ZeRO, arXiv:1910.02054.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/parallel/fsdp/fully_sharded_core.h"
#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/fsdp/shard_unit.h"
#include "cadre/parallel/reduction/data_parallel_module.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/hooks/map_tensors.h"
#include "cadre/tensor/hooks/output_tensors.h"
#include "cadre/tensor/mesh/ranks.h"

namespace cadre {

// A scope of whole parameters: while this object exists, every rank has the whole parameters of the
// module, and neither forward nor backward is allowed. All ranks make and destroy it together.
class [[nodiscard]] FullParameters {
 public:
  ~FullParameters() {
    if (core_) core_->dismiss();
  }
  FullParameters(FullParameters&&) noexcept = default;
  FullParameters& operator=(FullParameters&&) = delete;

  // Copies the parameters to the shards after the program has written to the parameters, with the
  // same values on all ranks. Without this call the written values are lost. All ranks make this
  // call.
  void write_back() { parallel::checked(core_, "FullParameters").write_back(); }

 private:
  template <typename M>
  friend class FullyShardedDataParallel;
  explicit FullParameters(std::shared_ptr<parallel::FullyShardedCore> core)
      : core_(std::move(core)) {
    parallel::checked(core_, "FullParameters").summon();
  }

  std::shared_ptr<parallel::FullyShardedCore> core_;
};

// M is a torch::nn::Module whose forward() may have any arguments; see DataParallelModule.
template <typename M>
class FullyShardedDataParallel : public DataParallelModule<M> {
 public:
  using Options = FullyShardedDataParallelOptions;

  // ranks: a ProcessGroup; or a DeviceMesh of one axis, or of two axes: ranks along the first one
  // hold the same shards, ranks along the second one own different shards.
  FullyShardedDataParallel(const std::shared_ptr<M>& module, const Ranks& ranks,
                           const Options& options = {})
      : FullyShardedDataParallel(module, std::make_shared<parallel::FullyShardedCore>(
                                             module, parallel::ShardGroups::of(ranks), options)) {}
  // Takes ShardGroups (fully_sharded_core.h). Tests use this to pass groups with their own
  // backends.
  template <typename Groups>
    requires requires(const Groups& groups) { groups.shard_axis; }
  FullyShardedDataParallel(const std::shared_ptr<M>& module, const Groups& groups,
                           const Options& options = {})
      : FullyShardedDataParallel(
            module, std::make_shared<parallel::FullyShardedCore>(module, groups, options)) {}

  // Takes a module holder, for example Net of TORCH_MODULE(Net) or torch::nn::Sequential.
  template <ModuleHolder Holder>
    requires std::is_same_v<typename Holder::ContainedType, M>
  FullyShardedDataParallel(const Holder& module, const Ranks& ranks, const Options& options = {})
      : FullyShardedDataParallel(module.is_empty() ? nullptr : module.ptr(), ranks, options) {}

  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  template <typename... Args>
  auto forward(Args&&... args) {
    parallel::FullyShardedCore& core = sharded();
    M& module = *this->module();
    using Output = decltype(module.forward(std::forward<Args>(args)...));
    static_assert(wrap::tensors_are_known<Output>(),
                  "cadre::FullyShardedDataParallel: the wrapper must see the tensors that "
                  "forward() returns. Return a tensor, or a tuple, pair, vector, map or optional "
                  "of tensors; for a struct of your own, define std::vector<torch::Tensor> "
                  "held_tensors(const YourStruct&) beside it");
    Pass pass(core, wrap::num_rows_of(args...));
    const auto cast = [this](const at::Tensor& tensor) { return sharded_->cast_input(tensor); };
    const auto run = [&]() -> Output {
      if constexpr (requires { module.forward(wrap::with_tensors<Copied<Args>>(args, cast)...); }) {
        if (sharded_->casts_inputs()) {
          return module.forward(wrap::with_tensors<Copied<Args>>(args, cast)...);
        }
      }
      return module.forward(std::forward<Args>(args)...);
    };
    if constexpr (std::is_void_v<Output>) {
      run();
      pass.returned({});
    } else {
      auto output = run();
      if (sharded_->casts_outputs()) {
        wrap::replace_tensors(
            output, [this](const at::Tensor& tensor) { return sharded_->cast_output(tensor); });
      }
      pass.returned(wrap::tensors_of(output));
      return output;
    }
  }

  // Returns this rank's shards, for an optimizer: one tensor for each parameter of the module
  // except those of options.ignored, in the order of named_parameters(). A tensor is empty if this
  // rank owns no element of its parameter.
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> values;
    for (const ParameterShard& shard : parameter_shards()) values.push_back(shard.values);
    return values;
  }
  std::vector<ParameterShard> parameter_shards() const { return sharded().parameter_shards(); }

  // Returns the form of the shards: kMapped if the shards of all units are mapped, else kGathered.
  // Ranks that own shards of the same replica get the same result.
  ShardForm form() const { return sharded().form(); }

  // Gathers the parameters of all units, which stay whole while the returned object exists.
  // Collective.
  FullParameters summon_full_params() { return FullParameters(sharded_); }

  // Documented in DataParallelModule.
  void reduce_gradients() { sharded().reduce_gradients(); }

  // Return the number of bytes of gathered parameters in this rank's memory: now, and at the peak.
  // Mapped parameters do not count, because the ranks share their memory.
  int64_t full_bytes() const { return sharded().full_bytes(); }
  int64_t peak_full_bytes() const { return sharded().peak_full_bytes(); }
  // Returns the number of bytes in this rank's offload file (FileOffload).
  int64_t file_bytes() const { return sharded().file_bytes(); }

 private:
  friend struct shard::WrapperAccess;
  std::shared_ptr<shard::ShardFence> shard_fence() const { return sharded().shard_fence(); }

  template <typename Arg>
  using Copied = const std::remove_cvref_t<Arg>&;

  // One forward of the root module. If this object is destroyed before returned() was called, the
  // forward has thrown.
  class Pass {
   public:
    Pass(parallel::FullyShardedCore& core, std::optional<int64_t> num_rows)
        : core_(core), call_(core.before_forward(num_rows)) {}
    ~Pass() {
      if (call_) core_.fail_forward();
    }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;
    void returned(std::span<const at::Tensor> outputs) {
      core_.after_forward(call_, outputs);
      call_ = nullptr;
      core_.check_evaluation();
    }

   private:
    parallel::FullyShardedCore& core_;
    parallel::ShardedUnits::Call call_;
  };

  FullyShardedDataParallel(const std::shared_ptr<M>& module,
                           std::shared_ptr<parallel::FullyShardedCore> core)
      : DataParallelModule<M>(module, core->data_parallel()), sharded_(std::move(core)) {}

  parallel::FullyShardedCore& sharded() const {
    return parallel::checked(sharded_, "FullyShardedDataParallel");
  }

  std::shared_ptr<parallel::FullyShardedCore> sharded_;  // FullParameters share it
};

template <ModuleHolder Holder, typename Given>
FullyShardedDataParallel(const Holder&, const Given&)
    -> FullyShardedDataParallel<typename Holder::ContainedType>;
template <ModuleHolder Holder, typename Given>
FullyShardedDataParallel(const Holder&, const Given&, const FullyShardedDataParallelOptions&)
    -> FullyShardedDataParallel<typename Holder::ContainedType>;
template <typename M, typename Given>
FullyShardedDataParallel(const std::shared_ptr<M>&, const Given&) -> FullyShardedDataParallel<M>;
template <typename M, typename Given>
FullyShardedDataParallel(const std::shared_ptr<M>&, const Given&,
                         const FullyShardedDataParallelOptions&) -> FullyShardedDataParallel<M>;

}  // namespace cadre
