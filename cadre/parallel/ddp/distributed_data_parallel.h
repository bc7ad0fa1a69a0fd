// Trains one model on many ranks: each rank computes gradients with its part of the batch, and the
// mean of the gradients over the ranks is computed during backward. examples/ddp_toy.cpp is a
// complete program.
//
// Threads: forward, backward and all methods of one wrapper must be called from the same thread;
// another wrapper may use another thread. Blocking: the constructor, which is a collective (it
// checks that the models match and broadcasts rank 0's values), a forward in training mode if the
// module has buffers to broadcast, and backward() wait until the group's deadline. Lifetime: shares
// the module and keeps the group alive. Gradients are views of flat buckets, unless they are
// sharded. Errors: cadre::Error. If a parameter was added, replaced, resized, moved or unfrozen
// after the wrapping, the next forward throws an error with its name. Freezing a parameter is
// allowed if all ranks do it. In a world of one rank the wrapper only calls the module. With
// GradientPlacement::kSharded each rank gets only the reduced gradients of the shards that it owns
// (parameter_shards()), and ZeroRedundancyOptimizer updates these shards. Source:
// torch.nn.parallel.DistributedDataParallel.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/parallel/ddp/ddp_replicas.h"
#include "cadre/parallel/ddp/options.h"
#include "cadre/parallel/reduction/data_parallel_module.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/mesh/ranks.h"

namespace cadre {

// DataParallelModule says which modules M are allowed.
template <typename M>
class DistributedDataParallel : public DataParallelModule<M> {
 public:
  // ranks: a ProcessGroup, or a mesh of one axis.
  DistributedDataParallel(std::shared_ptr<M> module, const Ranks& ranks,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(module, parallel::make_ddp_replicas(module, ranks, options)) {}

  // Takes a module holder, for example Net of TORCH_MODULE(Net), torch::nn::Sequential or
  // torch::nn::Linear.
  template <ModuleHolder Holder>
    requires std::is_same_v<typename Holder::ContainedType, M>
  DistributedDataParallel(const Holder& module, const Ranks& ranks,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(module.is_empty() ? nullptr : module.ptr(), ranks, options) {}

  template <typename Given, typename Group>
    requires(!std::is_convertible_v<Given, std::shared_ptr<M>> &&
             !ModuleHolder<std::remove_cvref_t<Given>>)
  DistributedDataParallel(Given&&, const Group&, const DistributedDataParallelOptions& = {})
      : DistributedDataParallel(nullptr, parallel::refuse_module<std::remove_cvref_t<Given>>()) {}

  // Makes a call without the group a compile error with a readable message.
  template <typename Given>
    requires(!std::is_same_v<std::remove_cvref_t<Given>, DistributedDataParallel>)
  explicit DistributedDataParallel(Given&&)
      : DistributedDataParallel(nullptr, parallel::refuse_module<std::remove_cvref_t<Given>>()) {}

  // Returns this rank's shard of each parameter of the module, in the order of named_parameters().
  // Throws kInvalidArgument unless gradients are GradientPlacement::kSharded. An optimizer must get
  // `values` of all shards, also of those without elements on this rank. A program that writes
  // `values` must hold a ShardUpdate, whose finish() gathers the parameters.
  std::vector<ParameterShard> parameter_shards() const {
    this->core();  // throws if this object was moved from
    return replicas_.parameter_shards();
  }
  // Returns the group of the wrapper, whose ranks all have a replica of the module.
  const ProcessGroup& process_group() const { return replicas_.group; }
  // Returns what the communication hook keeps on this rank between steps, under names; empty if it
  // keeps nothing. A run continues as before if each rank saves it and loads it into a wrapper with
  // the same hook and the same layout of buckets. The tensors may share memory with the hook.
  SavedCommHook comm_hook_state() const {
    this->core();  // throws if this object was moved from
    return replicas_.saved_hook();
  }
  // Throws kInvalidArgument, and changes nothing, if the hook has not saved this.
  void load_comm_hook_state(const SavedCommHook& saved) {
    this->core();
    replicas_.load_hook(saved);
  }
  // Sets a function that is called at the start of each forward, also without grad.
  // ZeroRedundancyOptimizer uses it to wait for the gathers of its last step.
  void call_before_forward(std::function<void()> call) {
    this->core().call_before_forward(std::move(call));
  }
  // Sets a function that is called at the start of each backward through an output of a later
  // forward, also in a world of one rank. ZeroRedundancyOptimizer uses it to increment version
  // counters after writes to its shards.
  void call_before_backward(std::function<void()> call) {
    this->core().call_before_backward(std::move(call));
  }

 private:
  friend struct shard::WrapperAccess;

  // Returns the flat buffers of the parameters, one for each bucket, if gradients are
  // GradientPlacement::kSharded; otherwise an empty list.
  const std::vector<std::shared_ptr<shard::FlatParameters>>& flat_parameters() const {
    return replicas_.flat_parameters;
  }

  DistributedDataParallel(std::shared_ptr<M> module, parallel::DdpReplicas replicas)
      : DataParallelModule<M>(std::move(module), replicas.core), replicas_(std::move(replicas)) {}

  parallel::DdpReplicas replicas_;
};

// Is deduced as the type of the module if an argument has a wrong type. So the compiler reports
// only the error of RefusedModule, and no errors that follow from it.
template <typename Given>
struct RefusedArgument {};

template <typename Given>
class DistributedDataParallel<RefusedArgument<Given>> {
 public:
  template <typename... Args>
  explicit DistributedDataParallel(Args&&...) {}

 private:
  parallel::RefusedModule<Given> refused_;
};

template <ModuleHolder Holder, typename Group>
DistributedDataParallel(const Holder&, const Group&)
    -> DistributedDataParallel<typename Holder::ContainedType>;
template <ModuleHolder Holder, typename Group>
DistributedDataParallel(const Holder&, const Group&, const DistributedDataParallelOptions&)
    -> DistributedDataParallel<typename Holder::ContainedType>;
template <typename M, typename Group>
DistributedDataParallel(std::shared_ptr<M>, const Group&) -> DistributedDataParallel<M>;
template <typename M, typename Group>
DistributedDataParallel(std::shared_ptr<M>, const Group&, const DistributedDataParallelOptions&)
    -> DistributedDataParallel<M>;
template <typename Given>
DistributedDataParallel(const Given&) -> DistributedDataParallel<RefusedArgument<Given>>;
template <typename Given, typename Group>
DistributedDataParallel(const Given&, const Group&)
    -> DistributedDataParallel<RefusedArgument<Given>>;
template <typename Given, typename Group>
DistributedDataParallel(const Given&, const Group&, const DistributedDataParallelOptions&)
    -> DistributedDataParallel<RefusedArgument<Given>>;

}  // namespace cadre
