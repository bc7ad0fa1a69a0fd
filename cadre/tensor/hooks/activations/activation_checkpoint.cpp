#include "cadre/tensor/hooks/activations/activation_checkpoint.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/tensor/device/device_search.h"
#include "cadre/tensor/hooks/autocast.h"
#include "cadre/tensor/hooks/operations/own_generator.h"

namespace cadre {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns the CPU, the devices of the tensors, and the current device of each type whose library is
// loaded: a function may move its inputs to that device, or use it for its parameters only.
std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& inputs,
                                    const std::vector<at::Tensor>& buffers) {
  std::vector<c10::Device> devices = {c10::Device(at::kCPU)};
  for (const c10::DeviceType type : device::loaded_device_types()) {
    const auto& runtime = device::find_devices(type).runtime;
    if (runtime) devices.push_back(runtime->current_device());
  }
  for (const std::vector<at::Tensor>* list : {&inputs, &buffers}) {
    for (const at::Tensor& tensor : *list) {
      if (tensor.is_meta() || std::ranges::count(devices, tensor.device()) > 0) continue;
      devices.push_back(tensor.device());
    }
  }
  return devices;
}

// The state of the default generator of a device. It is host memory, also that of CUDA, so reading
// and writing it waits for no kernel.
class RandomState {
 public:
  explicit RandomState(const c10::Device& device)
      : generator_(device.is_cpu() ? at::detail::getDefaultCPUGenerator()
                                   : at::globalContext().defaultGenerator(device)) {
    // What a thread draws from a generator of its own (OwnGenerator) is drawn from the default one
    // in the second forward, which runs in another thread.
    at::Generator source = generator_;
    if (device.is_cpu()) source = wrap::OwnGenerator::of_thread().value_or(source);
    const std::lock_guard<std::mutex> lock(source.mutex());
    state_ = source.get_state();
  }
  void restore() const {
    at::Generator generator = generator_;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state_);
  }

 private:
  at::Generator generator_;
  at::Tensor state_;
};

// The global state that a forward depends on: the random number generators of the CPU and of
// devices, and autocast.
struct ForwardState {
  explicit ForwardState(std::vector<c10::Device> of) : devices(std::move(of)) {
    for (const c10::Device& device : devices) random.emplace_back(device);
  }

  void restore() const {
    for (const RandomState& of_device : random) of_device.restore();
    autocast.restore();
  }

  std::vector<c10::Device> devices;
  std::vector<RandomState> random;
  wrap::AutocastState autocast;
};

// Sets the state that the first forward had, for the second forward. The destructor restores the
// present state.
class Restored {
 public:
  explicit Restored(const ForwardState& state) : before_(state.devices) {
    at::autocast::increment_nesting();
    state.restore();
  }
  // Autocast caches its casts of parameters. The cache must be cleared at the end of the outermost
  // scope; otherwise the next forward would use casts of the values before the optimizer's step.
  ~Restored() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    before_.restore();
  }
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;

 private:
  ForwardState before_;
};

struct Checkpointed {
  TensorFunction function;
  ForwardState state;
  std::vector<at::Tensor> buffers;       // values restored after the second forward
  std::vector<bool> requires_grad = {};  // one flag for each input
  bool may_be_partial = false;           // backward(inputs) may go through it
};

// True while this thread runs the inner backward of a checkpoint for which allow_partial_backward()
// was called. That backward computes the gradients of all parameters of the checkpoint, so nested
// checkpoints are allowed in it, too. Thread-local, because autograd runs an inner backward on the
// thread that called it.
bool& is_inside_partial() {
  static thread_local bool value = false;
  return value;
}

class InsidePartial {
 public:
  explicit InsidePartial(bool value) : before_(std::exchange(is_inside_partial(), value)) {}
  ~InsidePartial() { is_inside_partial() = before_; }
  InsidePartial(const InsidePartial&) = delete;
  InsidePartial& operator=(const InsidePartial&) = delete;

 private:
  bool before_;
};

std::vector<uint32_t> versions_of(const std::vector<at::Tensor>& tensors) {
  std::vector<uint32_t> versions;
  for (const at::Tensor& tensor : tensors) {
    versions.push_back(tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version()));
  }
  return versions;
}

// Saves the present values of tensors, such as BatchNorm's statistics, that the second forward may
// change. The destructor restores them. It runs after the backward, which may read the changed
// values. The version counters do not change, as when batch_norm() updates its statistics.
class KeptValues {
 public:
  explicit KeptValues(const std::vector<at::Tensor>& tensors) : tensors_(tensors) {
    for (const at::Tensor& tensor : tensors_) values_.push_back(tensor.detach().clone());
  }
  ~KeptValues() {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].variable_data().copy_(values_[i]);
  }
  KeptValues(const KeptValues&) = delete;
  KeptValues& operator=(const KeptValues&) = delete;

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> values_;
};

// Runs the first forward. Throws for a function that changes its inputs, because the second forward
// gets the same inputs.
variable_list run_first(const Checkpointed& checkpointed, const variable_list& inputs) {
  const std::vector<uint32_t> of_inputs = versions_of(inputs);
  variable_list outputs = checkpointed.function(inputs);
  const std::vector<uint32_t> now = versions_of(inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (now[i] == of_inputs[i]) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        format("cadre::ActivationCheckpoint: forward() has changed tensor {} of {} among its "
               "arguments in place, and backward would compute it again from the changed "
               "values. Work on a copy: x.clone(), or x + y instead of x.add_(y)",
               i, inputs.size()));
  }
  return outputs;
}

// Wraps a Checkpointed in a CustomClassHolder, because the saved_data of an autograd context can
// hold a C++ object only in such a class.
struct Holder : torch::CustomClassHolder {
  explicit Holder(Checkpointed held) : checkpointed(std::move(held)) {}
  Checkpointed checkpointed;
};

struct CheckpointFunction : torch::autograd::Function<CheckpointFunction> {
  // leaf: an empty tensor that requires grad. With it autograd calls this backward even if no input
  // requires grad, because the module's parameters may.
  static variable_list forward(AutogradContext* context, const at::Tensor& /*leaf*/,
                               at::TensorList inputs, const c10::intrusive_ptr<Holder>& holder) {
    variable_list given(inputs.begin(), inputs.end());
    for (const at::Tensor& input : given) {
      holder->checkpointed.requires_grad.push_back(input.requires_grad());
    }
    context->save_for_backward(given);
    context->saved_data["holder"] = c10::IValue::make_capsule(holder);
    variable_list outputs = run_first(holder->checkpointed, given);
    variable_list without_grad;
    for (at::Tensor& output : outputs) {
      // An output that is one of the inputs is replaced by a view, because autograd cannot track
      // one tensor as both.
      for (const at::Tensor& input : given) {
        if (output.is_same(input)) output = output.view_as(output);
      }
      // Grad mode is off here, so an output that requires grad was not computed by the function,
      // but is for example a parameter that it returns. It is detached, so that the parameter
      // itself does not become a result of this node.
      if (output.requires_grad()) output = output.detach();
      if (!output.is_floating_point() && !output.is_complex()) without_grad.push_back(output);
    }
    context->mark_non_differentiable(without_grad);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (at::GradMode::is_enabled()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          "cadre::ActivationCheckpoint: backward with create_graph=true does not go through "
          "a checkpointed module; use the plain module where second derivatives are needed");
    }
    const auto capsule = context->saved_data["holder"].toCapsule();
    const auto& checkpointed = static_cast<Holder&>(*capsule).checkpointed;
    // The inner backward below adds to the gradients of all parameters that the function uses, even
    // if the outer backward has a list of inputs.
    const bool may_be_partial = checkpointed.may_be_partial || is_inside_partial();
    if (!may_be_partial && !torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "cadre::ActivationCheckpoint: autograd::grad(), and backward() with a list of "
                  "inputs, do not go through a checkpointed module, because its parameters would "
                  "get gradients that were not asked for; use a plain backward(), or the plain "
                  "module");
    }
    variable_list inputs = context->get_saved_variables();
    for (size_t i = 0; i < inputs.size(); ++i) {
      inputs[i] = inputs[i].detach();
      inputs[i].requires_grad_(checkpointed.requires_grad[i]);
    }
    const KeptValues buffers(checkpointed.buffers);
    variable_list outputs;
    {
      const Restored state(checkpointed.state);
      const at::AutoGradMode with_grad(true);
      outputs = checkpointed.function(inputs);
    }
    variable_list roots;
    variable_list roots_gradients;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].requires_grad() || !gradients[i].defined()) continue;
      roots.push_back(outputs[i]);
      roots_gradients.push_back(gradients[i]);
    }
    if (!roots.empty()) {
      const InsidePartial inside(may_be_partial);
      torch::autograd::backward(roots, roots_gradients);
    }
    variable_list result(inputs.size() + 2);  // stays undefined for leaf and holder
    for (size_t i = 0; i < inputs.size(); ++i) result[i + 1] = inputs[i].grad();
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> checkpoint(TensorFunction function, const std::vector<at::Tensor>& inputs,
                                   std::vector<at::Tensor> buffers) {
  const at::Tensor leaf = at::zeros({0}).requires_grad_(true);
  ForwardState state(devices_of(inputs, buffers));
  return CheckpointFunction::apply(leaf, at::TensorList(inputs),
                                   c10::make_intrusive<Holder>(Checkpointed{
                                       std::move(function), std::move(state), std::move(buffers)}));
}

bool is_checkpoint(const torch::autograd::Node& node) {
  return dynamic_cast<const torch::autograd::CppNode<CheckpointFunction>*>(&node) != nullptr;
}

void allow_partial_backward(torch::autograd::Node& checkpoint) {
  auto& node = dynamic_cast<torch::autograd::CppNode<CheckpointFunction>&>(checkpoint);
  const auto capsule = node.ctx_.saved_data["holder"].toCapsule();
  static_cast<Holder&>(*capsule).checkpointed.may_be_partial = true;
}

bool checkpointing_is_useful() {
  return at::GradMode::is_enabled();
}

}  // namespace cadre
