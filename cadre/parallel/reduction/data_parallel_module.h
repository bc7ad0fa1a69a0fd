// The part of every wrapper that averages gradients in a backward: it calls the module and passes
// the module's inputs and outputs to DataParallelCore.
//
// Threads, blocking, errors: those of DataParallelCore. Lifetime: shares the module and the core.
// Parameters keep the names that they have in the module. torch::autograd::grad() reduces nothing.
// Hooks that the program registers see this rank's gradient before it is reduced.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/parallel/reduction/data_parallel_core.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/hooks/output_tensors.h"

namespace cadre {

template <typename M>
class DataParallelModule;

struct NoSyncOptions {
  // If true, the program multiplies the loss of each part by the samples of the part divided by the
  // samples of this rank in the whole step. Then parts may have different numbers of samples, and
  // no warning about them is logged.
  bool losses_are_weighted = false;
};

// While this object exists, backward() adds to this rank's gradients and reduces nothing. The first
// backward() after its destruction reduces the sum. The sum must be the gradient of the mean over
// all samples of this rank in the step: see DataParallelModule::backward_in_parts().
class [[nodiscard]] NoSync {
 public:
  ~NoSync() {
    if (core_) core_->leave_no_sync();
  }
  NoSync(NoSync&&) noexcept = default;
  NoSync& operator=(NoSync&&) = delete;

 private:
  template <typename M>
  friend class DataParallelModule;
  NoSync(std::shared_ptr<reduction::DataParallelCore> core, const NoSyncOptions& options)
      : core_(std::move(core)) {
    core_->enter_no_sync(options.losses_are_weighted);
  }

  // A shared pointer, because this object may outlive the wrapper.
  std::shared_ptr<reduction::DataParallelCore> core_;
};

// A class that holds a module M: a class made by TORCH_MODULE(Net), or torch::nn::Sequential.
template <typename Holder>
concept ModuleHolder = requires { typename Holder::ContainedType; };

// M is a torch::nn::Module with a forward() of any arguments. The wrapper must find the tensors in
// what forward() returns: a tensor, or tuples, pairs, ranges, maps and optionals of tensors. For a
// struct of your own see tensor/hooks/output_tensors.h.
template <typename M>
class DataParallelModule {
 public:
  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  template <typename... Args>
  auto forward(Args&&... args) {
    using Output = decltype(module_->forward(std::forward<Args>(args)...));
    static_assert(wrap::tensors_are_known<Output>(),
                  "cadre: the wrapper of a module must see the tensors that forward() returns. "
                  "Return a tensor, or a tuple, pair, vector, map or optional of tensors; "
                  "for a struct of your own, define std::vector<torch::Tensor> "
                  "held_tensors(const YourStruct&) beside it");
    core().before_forward(module()->is_training(), wrap::num_rows_of(args...));
    if constexpr (std::is_void_v<Output>) {
      module_->forward(std::forward<Args>(args)...);
      core_->after_forward({});
    } else {
      auto output = module_->forward(std::forward<Args>(args)...);
      core_->after_forward(wrap::tensors_of(output));
      return output;
    }
  }

  // These return the wrapped module, for example for model->named_parameters(). Call model->to(...)
  // only before wrapping.
  M* operator->() const { return module().get(); }
  const std::shared_ptr<M>& module() const {
    if (module_ == nullptr) reduction::refuse_moved_from();
    return module_;
  }

  // Returns each parameter once, as Python's Module.parameters(). That of libtorch lists a tied
  // weight once for each of its names, and an optimizer would update it as often.
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> parameters;
    for (NamedTensor& parameter : distinct_parameters(*module())) {
      parameters.push_back(std::move(parameter.tensor));
    }
    return parameters;
  }
  // Clears the gradients of the parameters and of this rank's shards of them. module()->zero_grad()
  // does not know the shards; their gradients are then cleared when the next backward begins.
  void zero_grad(bool set_to_none = true) {
    core().zero_grad(set_to_none);
    module_->zero_grad(set_to_none);
  }
  void train(bool on = true) { module()->train(on); }
  void eval() { module()->eval(); }

  NoSync no_sync(const NoSyncOptions& options = {}) {
    core();
    return NoSync(core_, options);
  }

  // Computes the gradients of one step in parts, and reduces them in the backward of the last part.
  // `num_samples` are the numbers of samples of this rank in the parts. `loss_of(i)`, with size_t
  // i, calls the model on part i, once, and returns the mean loss over its samples; it is called
  // for parts without samples, too. Multiplies each loss by the samples of its part divided by the
  // samples of this rank, so that the gradients are those of the mean over the samples of all parts
  // and ranks, however these differ in size. With GradientWeighting::kSum losses are only added.
  // Returns this rank's loss of all parts; mean_over_ranks() of it is that of all ranks. Throws
  // kInvalidArgument, before the first part, without parts and for a negative count. Collective;
  // with sharded parameters all ranks need the same number of parts. If `loss_of` or a backward
  // throws, clear the gradients before the next step.
  template <typename LossOf>
  at::Tensor backward_in_parts(std::span<const int64_t> num_samples, const LossOf& loss_of) {
    return core().backward_in_parts(num_samples,
                                    [&](size_t part) -> at::Tensor { return loss_of(part); });
  }

  // Sets the number of samples of this rank's next forward with grad, if that is not size(0) of its
  // first tensor. A forward that throws leaves the number for the next one. Needs
  // GradientWeighting::kSamples. The loss must be the mean over these samples. Under no_sync() the
  // counts of the forwards that have a backward add up until the gradients are reduced or cleared;
  // the accumulated gradients must be those of the mean over all samples counted.
  void set_num_samples(int64_t count) { core().set_num_samples(count); }

  // `value` is this rank's mean over the samples of its last forward, or of all parts after
  // backward_in_parts(), such as the loss. Returns the
  // mean over the samples of all ranks. Ignores ranks without samples, whose mean is NaN, and
  // throws kInvalidArgument on all ranks if no rank has a sample. Collective.
  double mean_over_ranks(const at::Tensor& value) {
    return core().mean_over_ranks(value.item<double>());
  }

  // Reduces, without a further backward, the gradients that backwards under no_sync() have
  // accumulated, and gradients that the program has assigned or changed. Collective.
  void reduce_gradients() { core().reduce_gradients(); }

  // Returns the order in which gradients are reduced, which the first step has learned, for a
  // snapshot. Returns nullopt before that, and if nothing is reduced. On resume, pass it to the
  // option `layout`.
  std::optional<BucketLayout> learned_layout() const { return core().learned_layout(); }

 protected:
  DataParallelModule(std::shared_ptr<M> module, std::shared_ptr<reduction::DataParallelCore> core)
      : module_(std::move(module)), core_(std::move(core)) {}
  ~DataParallelModule() = default;
  DataParallelModule(const DataParallelModule&) = default;
  DataParallelModule& operator=(const DataParallelModule&) = default;
  DataParallelModule(DataParallelModule&&) noexcept = default;
  DataParallelModule& operator=(DataParallelModule&&) noexcept = default;

  reduction::DataParallelCore& core() const {
    if (core_ == nullptr) reduction::refuse_moved_from();
    return *core_;
  }

 private:
  std::shared_ptr<M> module_;
  std::shared_ptr<reduction::DataParallelCore> core_;  // NoSync objects share it
};

}  // namespace cadre
