#include "cadre/parallel/averaging/exponential_moving_average.h"

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/nn/module.h>

#include <optional>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/averaging/saved_tensors.h"
#include "cadre/parallel/shard/shardable.h"
#include "cadre/tensor/hooks/parameter_watch.h"
#include "cadre/tensor/hooks/tensor_version.h"

namespace cadre {
namespace {

constexpr const char* kMovingAverage = "ExponentialMovingAverage";
constexpr const char* kUpdates = "num_updates";
constexpr const char* kAverage = "average.";

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, format("{}: {}", kMovingAverage, what));
}

// Returns the tensors of the module that are averaged. Throws for one that has no values.
std::vector<NamedTensor> moving_tensors_of(const torch::nn::Module& module, bool with_buffers) {
  std::vector<NamedTensor> found;
  for (const NamedTensor& parameter : distinct_parameters(module)) {
    if (const auto reason = shard::reason_without_values(parameter.tensor)) {
      refuse(
          format("the parameter \"{}\" has no values on this rank; {}. Average a plain module, "
                 "or one under DistributedDataParallel or ZeroRedundancyOptimizer",
                 parameter.name, *reason));
    }
    found.push_back(parameter);
  }
  if (!with_buffers) return found;
  for (const NamedTensor& buffer : distinct_buffers(module)) {
    if (buffer.tensor.is_floating_point()) found.push_back(buffer);
  }
  return found;
}

at::ScalarType dtype_of_average(const at::Tensor& tensor) {
  return at::toOpMathType(tensor.scalar_type());
}

}  // namespace

struct ExponentialMovingAverage::Averages {
  Averages(const std::shared_ptr<torch::nn::Module>& module, const MovingAverageOptions& options)
      : decay(options.decay),
        tensors(moving_tensors_of(*module, options.average_buffers)),
        watch(module) {
    const at::NoGradGuard no_grad;
    for (const NamedTensor& tensor : tensors) {
      averages.push_back(tensor.tensor.detach().to(dtype_of_average(tensor.tensor),
                                                   /*non_blocking=*/false, /*copy=*/true));
    }
  }

  // Freezing or unfreezing a parameter does not matter, because all are averaged.
  void check_unchanged() const {
    if (const auto change = watch.change_of_list()) {
      refuse(
          format("{} since it was made, so the averages are not those of the module. Make "
                 "another one after the change",
                 *change));
    }
  }

  const double decay;
  const std::vector<NamedTensor> tensors;
  const wrap::ParameterWatch watch;
  std::vector<at::Tensor> averages;
  int64_t num_updates = 0;
  bool is_swapped_in = false;
  std::optional<std::string> lost_change = {};  // the name of a tensor that was changed meanwhile
};

ExponentialMovingAverage::ExponentialMovingAverage(const std::shared_ptr<torch::nn::Module>& module,
                                                   const MovingAverageOptions& options) {
  if (module == nullptr) refuse("the module is null; construct it first");
  if (!(options.decay >= 0 && options.decay < 1)) {
    refuse(format("the decay is {}; expected 0 up to, but not including, 1", options.decay));
  }
  wrap::refuse_inference_mode(kMovingAverage);
  averages_ = std::make_shared<Averages>(module, options);
}

void ExponentialMovingAverage::update() {
  Averages& all = *averages_;
  if (all.is_swapped_in) {
    refuse(
        "update() while the module has the averaged weights. Destroy the result of swap_in() "
        "before");
  }
  if (const auto name = std::exchange(all.lost_change, std::nullopt)) {
    refuse(
        format("\"{}\" was changed while the module had the averaged weights, and the change "
               "is lost. Destroy the result of swap_in() before the optimizer's step",
               *name));
  }
  all.check_unchanged();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < all.tensors.size(); ++i) {
    const at::Tensor& weight = all.tensors[i].tensor;
    at::Tensor& average = all.averages[i];
    if (all.num_updates == 0) {
      average.copy_(weight);
    } else if (average.is_floating_point() || average.is_complex()) {
      average.lerp_(weight.to(average.scalar_type()), 1 - all.decay);
    }
  }
  ++all.num_updates;
}

int64_t ExponentialMovingAverage::num_updates() const {
  return averages_->num_updates;
}

std::vector<NamedTensor> ExponentialMovingAverage::averages() const {
  std::vector<NamedTensor> named;
  for (size_t i = 0; i < averages_->tensors.size(); ++i) {
    named.push_back({averages_->tensors[i].name, averages_->averages[i]});
  }
  return named;
}

ExponentialMovingAverage::SwappedIn ExponentialMovingAverage::swap_in() {
  if (averages_->is_swapped_in) refuse("the module has the averaged weights already");
  averages_->check_unchanged();
  return SwappedIn(averages_);
}

ExponentialMovingAverage::SwappedIn::SwappedIn(std::shared_ptr<Averages> averages)
    : averages_(std::move(averages)) {
  const at::NoGradGuard no_grad;
  for (const NamedTensor& tensor : averages_->tensors) {
    own_.push_back(tensor.tensor.detach().clone());
  }
  averages_->is_swapped_in = true;
  for (size_t i = 0; i < own_.size(); ++i) {
    const at::Tensor& tensor = averages_->tensors[i].tensor;
    tensor.detach().copy_(averages_->averages[i]);
    versions_.push_back(wrap::version_of(tensor));
  }
}

ExponentialMovingAverage::SwappedIn::~SwappedIn() {
  if (averages_ == nullptr) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < own_.size(); ++i) {
    const NamedTensor& tensor = averages_->tensors[i];
    if (wrap::version_of(tensor.tensor) != versions_[i]) averages_->lost_change = tensor.name;
    tensor.tensor.detach().copy_(own_[i]);
  }
  averages_->is_swapped_in = false;
}

ExponentialMovingAverage::State ExponentialMovingAverage::state() const {
  State state = {{kUpdates, at::scalar_tensor(averages_->num_updates, at::kLong)}};
  for (const NamedTensor& average : averages()) {
    state.emplace_back(kAverage + average.name, average.tensor.clone());
  }
  return state;
}

void ExponentialMovingAverage::load_state(const State& state) {
  averaging::SavedTensors saved("ExponentialMovingAverage::load_state()", state);
  const int64_t num_updates = saved.take_count(kUpdates);
  std::vector<at::Tensor> loaded;
  for (size_t i = 0; i < averages_->tensors.size(); ++i) {
    const at::Tensor& own = averages_->averages[i];
    loaded.push_back(
        saved.take(kAverage + averages_->tensors[i].name, own.sizes(), own.scalar_type()));
  }
  saved.check_all_taken();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < loaded.size(); ++i) averages_->averages[i].copy_(loaded[i]);
  averages_->num_updates = num_updates;
}

}  // namespace cadre
