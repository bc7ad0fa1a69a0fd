#include "cadre/parallel/batchnorm/batch_norm_operator.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_native.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "cadre/core/os/keep_until_exit.h"
#include "cadre/parallel/batchnorm/batch_statistics.h"

namespace cadre::batchnorm {
namespace {

// The tensors of converted layers. They are known by identity, not by memory: Module::to(),
// set_data() and the wrappers give a parameter other memory.
class Table {
 public:
  static Table& instance() {
    // The kernel, which looks tensors up here, has no context argument. The table is never
    // destroyed, because modules may be destroyed at exit, in any order.
    static Table& table = *os::keep_until_exit(std::make_unique<Table>());
    return table;
  }

  void add(const at::Tensor& tensor, const std::shared_ptr<SynchronousLayer>& layer) {
    const std::lock_guard lock(mutex_);
    std::erase_if(layers_, [](const auto& entry) { return entry.second.layer.expired(); });
    // A tensor of two modules stays that of the first one.
    layers_.try_emplace(tensor.unsafeGetTensorImpl(),
                        Entry{.tensor = WeakTensor(tensor.getIntrusivePtr()), .layer = layer});
  }

  std::shared_ptr<SynchronousLayer> find(const std::optional<at::Tensor>& tensor) const {
    if (!tensor || !tensor->defined()) return nullptr;
    const std::shared_lock lock(mutex_);
    const auto found = layers_.find(tensor->unsafeGetTensorImpl());
    return found == layers_.end() ? nullptr : found->second.layer.lock();
  }

 private:
  // Does not keep the tensor alive, but prevents that another tensor gets its address.
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    WeakTensor tensor;
    std::weak_ptr<SynchronousLayer> layer;
  };

  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Entry> layers_;
};

void update_running(const std::optional<at::Tensor>& running, const at::Tensor& value,
                    double momentum) {
  if (!running || !running->defined()) return;
  running->mul_(1 - momentum).add_(value.to(running->scalar_type()), momentum);
}

// Modules without parameters pass undefined tensors.
std::optional<at::Tensor> if_defined(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? tensor : std::nullopt;
}

// The kernel of aten::batch_norm.
at::Tensor run_batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                          const std::optional<at::Tensor>& bias,
                          const std::optional<at::Tensor>& running_mean,
                          const std::optional<at::Tensor>& running_var, bool training,
                          double momentum, double eps, bool cudnn_enabled) {
  if (training) {
    // Two modules may share a weight, but not their running statistics.
    auto layer = Table::instance().find(running_mean);
    if (!layer) layer = Table::instance().find(weight);
    if (!layer) layer = Table::instance().find(bias);
    // `training` is also set in eval mode without running statistics, in which the layer uses the
    // statistics of this rank's batch.
    if (layer && layer->is_training() && !layer->is_alone()) {
      const AffineOptions affine{
          .weight = if_defined(weight), .bias = if_defined(bias), .eps = eps};
      return synchronous_batch_norm(
          layer, input, affine,
          {.mean = running_mean, .variance = running_var, .momentum = momentum});
    }
  }
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum,
                                eps, cudnn_enabled);
}

struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

c10::RegistrationHandleRAII register_kernel() {
  // libtorch warns of a kernel that replaces one of its own, as this one does.
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  return c10::Dispatcher::singleton().registerImpl(
      {"aten::batch_norm", ""}, c10::DispatchKey::CompositeImplicitAutograd,
      c10::KernelFunction::makeFromUnboxedRuntimeFunction(&run_batch_norm), std::nullopt, nullptr,
      "cadre: synchronous batch normalization");
}

void install_kernel() {
  // The kernel stays registered until the process ends, because converted modules may live so long.
  static const c10::RegistrationHandleRAII& installed = os::keep_until_exit(register_kernel());
  static_cast<void>(installed);
}

}  // namespace

at::Tensor synchronous_batch_norm(const std::shared_ptr<SynchronousLayer>& layer,
                                  const at::Tensor& input, const AffineOptions& affine,
                                  const RunningStatistics& running) {
  const bool needs_gradient = at::GradMode::is_enabled() && input.requires_grad();
  const BatchStatistics statistics =
      exchange_statistics(*layer, input, {.needs_gradient = needs_gradient});
  {
    const at::NoGradGuard no_grad;
    const double correction = statistics.count / (statistics.count - 1);
    update_running(running.mean, statistics.mean, running.momentum);
    update_running(running.variance, statistics.variance * correction, running.momentum);
  }
  return normalize(layer, input, statistics, affine);
}

void make_synchronous(const std::shared_ptr<SynchronousLayer>& layer,
                      std::span<const at::Tensor> tensors) {
  install_kernel();
  for (const at::Tensor& tensor : tensors) Table::instance().add(tensor, layer);
}

}  // namespace cadre::batchnorm
