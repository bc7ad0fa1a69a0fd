#include "cadre/parallel/data_parallel/replicate.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <mutex>
#include <string>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/tensor/autograd/autograd_node.h"

namespace cadre::data_parallel {
namespace {

using torch::autograd::variable_list;
using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

[[noreturn]] void refuse_replica(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "data_parallel::replicate: " + what);
}

// The graph's node between a parameter of the module and its copies in the replicas. Adds the
// gradients of the copies in the order of the replicas.
class AddGradients final : public torch::autograd::Node {
 public:
  explicit AddGradients(const at::Tensor& parameter) : device_(parameter.device()) {
    add_next_edge(torch::autograd::impl::gradient_edge(parameter));
  }

  variable_list apply(variable_list&& gradients) override {
    at::Tensor sum;
    for (const at::Tensor& gradient : gradients) {
      if (!gradient.defined()) continue;
      const at::Tensor here = gradient.to(device_);
      sum = sum.defined() ? sum + here : here;
    }
    return {std::move(sum)};
  }

 private:
  const c10::Device device_;
};

// A hook that does nothing but own the replicas.
class KeepReplicas final : public torch::autograd::FunctionPostHook {
 public:
  explicit KeepReplicas(std::shared_ptr<const std::vector<ModulePointer>> replicas)
      : replicas_(std::move(replicas)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    return outputs;
  }

 private:
  const std::shared_ptr<const std::vector<ModulePointer>> replicas_;
};

// Gives the default generator of the CPU its state back: making a replica initializes parameters,
// which are replaced.
class KeptRandomState {
 public:
  KeptRandomState() {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  ~KeptRandomState() {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(state_);
  }
  KeptRandomState(const KeptRandomState&) = delete;
  KeptRandomState& operator=(const KeptRandomState&) = delete;

 private:
  at::Generator generator_ = at::detail::getDefaultCPUGenerator();
  at::Tensor state_;
};

// Refuses what replicas cannot share.
void check_module(const torch::nn::Module& module, const c10::Device& device) {
  const auto check_place = [&](const char* kind, const std::string& name,
                               const at::Tensor& tensor) {
    if (tensor.device() == device) return;
    refuse_replica(
        format("{} {} is on {} and the first device is {}; move the module there: to(device)", kind,
               name, tensor.device().str(), device.str()));
  };
  for (const auto& item : module.named_parameters()) {
    check_place("parameter", item.key(), item.value());
    // A unit of FullyShardedDataParallel gathers its parameters in operations of one thread.
    if (item.value().key_set().has(c10::DispatchKey::TESTING_ONLY_GenericWrapper)) {
      refuse_replica(
          format("parameter {} belongs to FullyShardedDataParallel, which cannot be replicated; "
                 "replicate the module before it is wrapped, or use the wrapper alone",
                 item.key()));
    }
  }
  for (const auto& item : module.named_buffers()) {
    check_place("buffer", item.key(), item.value());
    if (!item.value().requires_grad()) continue;
    refuse_replica(
        format("buffer {} requires a gradient, and buffers of replicas are copies; register it "
               "as a parameter",
               item.key()));
  }
}

void check_same_names(const char* kind, const NamedTensors& own, const NamedTensors& made) {
  for (const auto& item : own) {
    const at::Tensor* const copy = made.find(item.key());
    if (copy == nullptr) refuse_replica(format("the replica has no {} {}", kind, item.key()));
    if (copy->sizes() == item.value().sizes() && copy->dtype() == item.value().dtype()) continue;
    refuse_replica(format("{} {} of the replica has another shape or dtype than that of the module",
                          kind, item.key()));
  }
  for (const auto& item : made) {
    if (!own.contains(item.key())) {
      refuse_replica(
          format("the replica has a {} {}, which the module does not have", kind, item.key()));
    }
  }
}

// Makes `copy` a view of the parameter's values, or a copy on another device.
void share_values(const at::Tensor& parameter, at::Tensor& copy, const c10::Device& device) {
  copy.detach_();
  const at::Tensor values = parameter.detach();
  if (device == parameter.device()) {
    copy.set_data(values);
    // A change of the parameter between forward and backward is an error of autograd, as it is for
    // the module itself.
    torch::autograd::impl::set_version_counter(copy,
                                               torch::autograd::impl::version_counter(parameter));
  } else {
    copy.set_data(values.to(device));
  }
}

void set_modes(const torch::nn::Module& module, const ModulePointer& replica) {
  const auto own = module.modules();
  const auto made = replica->modules();
  if (own.size() != made.size()) {
    refuse_replica(
        format("the module has {} modules and the replica has {}", own.size(), made.size()));
  }
  // A parent comes before its children, so a child that differs from it is set last.
  for (size_t i = 0; i < own.size(); ++i) made[i]->train(own[i]->is_training());
}

ModulePointer make_checked(const torch::nn::Module& module,
                           const std::function<ModulePointer()>& make) {
  ModulePointer replica;
  try {
    replica = make();
  } catch (const c10::Error& error) {
    refuse_replica(
        format("the module cannot be copied ({}); derive it from torch::nn::Cloneable, or pass a "
               "function that makes a replica",
               error.what_without_backtrace()));
  }
  if (replica == nullptr || replica.get() == &module) {
    refuse_replica("the function that makes a replica has returned no module of its own");
  }
  check_same_names("parameter", module.named_parameters(), replica->named_parameters());
  check_same_names("buffer", module.named_buffers(), replica->named_buffers());
  set_modes(module, replica);
  return replica;
}

}  // namespace

std::vector<ModulePointer> replicate(const ModulePointer& module,
                                     std::span<const c10::Device> devices,
                                     const std::function<ModulePointer()>& make) {
  if (module == nullptr) refuse_replica("the module is null");
  if (devices.empty()) refuse_replica("there is no device; pass at least one");
  check_module(*module, devices.front());
  std::vector<ModulePointer> replicas = {module};
  if (devices.size() == 1) return replicas;
  const bool needs_grad = at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  {
    const KeptRandomState random;
    for (size_t i = 1; i < devices.size(); ++i) replicas.push_back(make_checked(*module, make));
  }
  std::vector<NamedTensors> parameters_of;
  std::vector<NamedTensors> buffers_of;
  for (const ModulePointer& replica : replicas) {
    parameters_of.push_back(replica->named_parameters());
    buffers_of.push_back(replica->named_buffers());
  }
  for (const auto& item : parameters_of.front()) {
    const at::Tensor& parameter = item.value();
    const bool has_gradient = needs_grad && parameter.requires_grad();
    const auto node = has_gradient ? make_node<AddGradients>(parameter) : nullptr;
    for (size_t i = 1; i < devices.size(); ++i) {
      at::Tensor& copy = parameters_of[i][item.key()];
      share_values(parameter, copy, devices[i]);
      if (!has_gradient) continue;
      const auto number = node->add_input_metadata(copy);
      torch::autograd::impl::set_gradient_edge(copy, {node, number});
    }
  }
  for (const auto& item : buffers_of.front()) {
    for (size_t i = 1; i < devices.size(); ++i) {
      at::Tensor& copy = buffers_of[i][item.key()];
      copy.detach_();
      copy.set_data(item.value().detach().to(devices[i], /*non_blocking=*/false, /*copy=*/true));
    }
  }
  return replicas;
}

void keep_until_backward(std::span<const at::Tensor> outputs, std::vector<ModulePointer> replicas) {
  const auto kept = std::make_shared<const std::vector<ModulePointer>>(std::move(replicas));
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || output.grad_fn() == nullptr) continue;
    output.grad_fn()->add_post_hook(std::make_unique<KeepReplicas>(kept));
  }
}

}  // namespace cadre::data_parallel
