// Trains one model on many ranks: each computes the gradients of its share of a batch, and every
// rank steps with their mean.
// examples/ddp_toy.cpp is a whole program.
//
// Threads: forward, backward and every method from one thread; several wrappers in one process may
// each have a thread. Blocking: the constructor (collective: it checks that the models match and
// copies rank 0's values), a forward in training mode when there are buffers to broadcast, and
// backward(), each until the group's deadline.
// Lifetime: shares the module; keeps the group alive. Gradients are views of flat buckets.
// Errors: cadre::Error; a forward after the module's parameters have changed (added, replaced,
// resized, moved, unfrozen) names the first that did; to freeze one is allowed, on all ranks or on
// none. In a world of one it only calls the module.
// Parameters keep the names they have in the module. Not seen by the wrapper: torch::autograd::grad
// reduces nothing; hooks of your own see this rank's gradient, before it is reduced.
// Source: torch.nn.parallel.DistributedDataParallel.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/group/process_group.h"
#include "cadre/parallel/ddp/options.h"
#include "cadre/reduction/data_parallel_core.h"
#include "cadre/wrap/output_tensors.h"
#include "cadre/wrap/replica_group.h"

namespace cadre {

// While it lives, backward() adds to this rank's gradients and reduces nothing; the next backward()
// without it reduces the sum.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(std::shared_ptr<DataParallelCore> core) : core_(std::move(core)) {
    core_->enter_no_sync();
  }
  ~NoSync() {
    if (core_) core_->leave_no_sync();
  }
  NoSync(NoSync&&) noexcept = default;
  NoSync& operator=(NoSync&&) = delete;

 private:
  std::shared_ptr<DataParallelCore> core_;  // shared: the guard may outlive the wrapper
};

// Of a Holder: M. A holder is what TORCH_MODULE(Net) makes; torch::nn::Sequential is one.
template <typename Holder>
concept ModuleHolder = requires { typename Holder::ContainedType; };

template <typename Given>
inline constexpr bool kIsModulePointer = false;

// Ends the compilation with one sentence when `Given` was passed as a module.
template <typename Given>
struct RefusedModule {
  static_assert(kIsModulePointer<Given>,
                "cadre::DistributedDataParallel(module, group): pass a std::shared_ptr to a module "
                "(std::make_shared<Net>()) or a module holder (TORCH_MODULE, "
                "torch::nn::Sequential), then the group");
};

// M: a torch::nn::Module with a forward() of any arguments. What forward() returns must let the
// wrapper see its tensors: a tensor, or tuples, pairs, ranges, maps and optionals of such; for a
// struct of your own see wrap/output_tensors.h.
template <typename M>
class DistributedDataParallel {
 public:
  DistributedDataParallel(std::shared_ptr<M> module, const ProcessGroup& group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(std::move(module), make_replica_group(group), options) {}

  DistributedDataParallel(std::shared_ptr<M> module, std::shared_ptr<ReplicaGroup> group,
                          const DistributedDataParallelOptions& options = {})
      : module_(std::move(module)),
        core_(std::make_shared<DataParallelCore>(
            module_, std::move(group),
            WrapperName{.name = "DistributedDataParallel", .component = "ddp"}, options)) {}

  // A module holder: Net of TORCH_MODULE(Net), torch::nn::Sequential, torch::nn::Linear.
  template <ModuleHolder Holder, typename Group>
    requires std::is_same_v<typename Holder::ContainedType, M>
  DistributedDataParallel(const Holder& module, const Group& group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(module.is_empty() ? nullptr : module.ptr(), group, options) {}

  template <typename Given, typename Group>
    requires(!std::is_convertible_v<Given, std::shared_ptr<M>> &&
             !ModuleHolder<std::remove_cvref_t<Given>>)
  DistributedDataParallel(Given&&, const Group&, const DistributedDataParallelOptions& = {}) {
    [[maybe_unused]] const RefusedModule<std::remove_cvref_t<Given>> refused;
  }

  // Without the group.
  template <typename Given>
    requires(!std::is_same_v<std::remove_cvref_t<Given>, DistributedDataParallel>)
  explicit DistributedDataParallel(Given&&) {
    [[maybe_unused]] const RefusedModule<std::remove_cvref_t<Given>> refused;
  }

  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  template <typename... Args>
  auto forward(Args&&... args) {
    using Output = decltype(module_->forward(std::forward<Args>(args)...));
    static_assert(tensors_are_known<Output>(),
                  "cadre::DistributedDataParallel: the wrapper must see the tensors that forward() "
                  "returns. Return a tensor, or a tuple, pair, vector, map or optional of tensors; "
                  "for a struct of your own, define std::vector<torch::Tensor> "
                  "held_tensors(const YourStruct&) beside it");
    core_->before_forward(module_->is_training(), num_rows_of(args...));
    if constexpr (std::is_void_v<Output>) {
      module_->forward(std::forward<Args>(args)...);
      core_->after_forward({});
    } else {
      auto output = module_->forward(std::forward<Args>(args)...);
      core_->after_forward(tensors_of(output));
      return output;
    }
  }

  // The wrapped module: model->named_parameters(), model->zero_grad(); model->to(...) before
  // wrapping only.
  M* operator->() const { return module_.get(); }
  const std::shared_ptr<M>& module() const { return module_; }

  std::vector<at::Tensor> parameters() const { return module_->parameters(); }
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }

  NoSync no_sync() { return NoSync(core_); }

  // How many samples the next forward with grad that returns has on this rank, where that is not
  // size(0) of its first tensor; needs GradientWeighting::kSamples. The loss must be the mean over
  // them. Under no_sync() the counts of the forwards that a backward goes through add up, until the
  // gradients are reduced or cleared; what is reduced must be the mean over all samples counted.
  void set_num_samples(int64_t count) { core_->set_num_samples(count); }

  // The mean over the samples of all ranks of `value`, which is this rank's mean over those of its
  // last forward: the loss of a step, for example. It ignores ranks without samples, whose mean is
  // NaN. Collective.
  double mean_over_ranks(const at::Tensor& value) {
    return core_->mean_over_ranks(value.item<double>());
  }

  // Reduces what no_sync() backwards have gathered, without a further backward. Collective.
  void reduce_gradients() { core_->reduce_gradients(); }

  // The order of reduction that the first step has taught, for a snapshot; empty before that, and
  // in a world of one. Hand it to DistributedDataParallelOptions::layout on resume.
  std::optional<BucketLayout> learned_layout() const { return core_->learned_layout(); }

 private:
  std::shared_ptr<M> module_;
  std::shared_ptr<DataParallelCore> core_;  // shared with NoSync guards
};

// The module of a refused argument, so that the refusal is all that the compiler says.
template <typename Given>
struct RefusedArgument {};

template <typename Given>
class DistributedDataParallel<RefusedArgument<Given>> {
 public:
  template <typename... Args>
  explicit DistributedDataParallel(Args&&...) {}

 private:
  RefusedModule<Given> refused_;
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
