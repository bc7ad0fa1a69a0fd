// Trains one model on many ranks: each computes the gradients of its share of a batch, and every
// rank steps with their mean. examples/ddp_toy.cpp is a whole program.
//
// Threads: forward, backward and every method from one thread; several wrappers in one process may
// each have a thread. Blocking: the constructor (collective: it checks that the models match and
// copies rank 0's values), a forward in training mode when there are buffers to broadcast, and
// backward(), each until the group's deadline.
// Lifetime: shares the module; keeps the group alive. Gradients are views of flat buckets,
// unless they are sharded.
// Errors: cadre::Error; a forward after the module's parameters have changed (added, replaced,
// resized, moved, unfrozen) names the first that did; to freeze one is allowed, on all ranks or on
// none. In a world of one it only calls the module.
// With GradientPlacement::kSharded a gradient is reduced to the ranks that own a part of its
// parameter: see parameter_shards(). ZeroRedundancyOptimizer then steps on these parts.
// Source: torch.nn.parallel.DistributedDataParallel.
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

// M: see DataParallelModule.
template <typename M>
class DistributedDataParallel : public DataParallelModule<M> {
 public:
  // ranks: a ProcessGroup, or a mesh of one axis.
  DistributedDataParallel(std::shared_ptr<M> module, const Ranks& ranks,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(module, parallel::make_ddp_replicas(module, ranks, options)) {}

  // Takes a module holder: Net of TORCH_MODULE(Net), torch::nn::Sequential, torch::nn::Linear.
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

  // Makes a call without the group an error of the compiler.
  template <typename Given>
    requires(!std::is_same_v<std::remove_cvref_t<Given>, DistributedDataParallel>)
  explicit DistributedDataParallel(Given&&)
      : DistributedDataParallel(nullptr, parallel::refuse_module<std::remove_cvref_t<Given>>()) {}

  // Returns the part of each parameter of the module that this rank owns, in the order of
  // named_parameters(); needs GradientPlacement::kSharded. An optimizer is given the `values` of
  // all of them, also of those without an element here; a program that writes them holds a
  // ShardUpdate, whose end gathers the parameters.
  std::vector<ParameterShard> parameter_shards() const {
    this->core();  // throws if this object was moved from
    return replicas_.parameter_shards();
  }
  // Returns the ranks that have replicas of the module.
  const ProcessGroup& process_group() const { return replicas_.group; }
  // Makes each forward call `call` at its start, also without grad. In `call` an optimizer waits
  // for the parameters of its last step.
  void call_before_forward(std::function<void()> call) {
    this->core().call_before_forward(std::move(call));
  }
  // Makes each backward through an output of a later forward call `call` at its start, also in a
  // world of one. In `call` an optimizer reports writes to its shards to autograd.
  void call_before_backward(std::function<void()> call) {
    this->core().call_before_backward(std::move(call));
  }

 private:
  friend struct shard::WrapperAccess;

  // With GradientPlacement::kSharded, returns the buffers in which the parameters are, one for each
  // bucket. Otherwise the list is empty.
  const std::vector<std::shared_ptr<shard::FlatParameters>>& flat_parameters() const {
    return replicas_.flat_parameters;
  }

  DistributedDataParallel(std::shared_ptr<M> module, parallel::DdpReplicas replicas)
      : DataParallelModule<M>(std::move(module), replicas.core), replicas_(std::move(replicas)) {}

  parallel::DdpReplicas replicas_;
};

// Replaces the type of the module if an argument has a wrong type, so that the compiler reports
// this one error and no errors that follow from it.
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
