#include "cadre/testing/torch/late_device/kernel_call.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>

#include "cadre/testing/torch/late_device/generators.h"
#include "cadre/testing/torch/late_device/runtime.h"

namespace cadre::testing::late {
namespace {

using torch::jit::Stack;

constexpr std::array<std::string_view, 7> kDependOnValues = {
    "aten::nonzero",  "aten::masked_select",      "aten::_unique2",         "aten::unique_dim",
    "aten::bincount", "aten::unique_consecutive", "aten::repeat_interleave"};
// Their argument 1 is a list of indices, which may be CPU tensors.
constexpr std::array<std::string_view, 6> kTakeIndices = {
    "aten::index",     "aten::_unsafe_index",    "aten::index_put_",
    "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index_put"};

template <size_t kSize>
bool contains(const std::array<std::string_view, kSize>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Calls `visit` for each tensor in the value and returns the value with what it returned.
template <typename Visit>
c10::IValue map_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) return visit(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(visit(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      list.push_back(tensor && tensor->defined() ? std::optional(visit(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice()) return c10::Device(c10::kCPU);
  return value;
}

// A number that was wrapped as a tensor takes part in type promotion in its own way.
at::Tensor keep_wrapped(at::Tensor made, const at::Tensor& from) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return made;
}

at::Tensor zeros_for(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!is_late(tensor)) return keep_wrapped(tensor.clone(), tensor);
  const auto options = at::TensorOptions().dtype(tensor.scalar_type());
  return keep_wrapped(at::empty_strided(tensor.sizes(), tensor.strides(), options).zero_(), tensor);
}

void call_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.callBoxed(stack);
}

class KernelCall {
 public:
  KernelCall(const c10::OperatorHandle& op, Stack arguments)
      : op_(op), schema_(op.schema()), arguments_(std::move(arguments)) {
    check_operator();
    device_ = find_device();
    is_synchronous_ = depends_on_values();
  }

  Stack run() {
    const c10::DeviceGuard guard(late_device_of(device_));
    StreamQueue& queue = current_queue(device_);
    runtime().counters.add_kernel(device_);
    if (is_synchronous_) {
      runtime().counters.add_synchronous(device_, schema_.name());
      queue.synchronize();
    }
    map_arguments();
    const Stack values = is_synchronous_ ? values_now() : values_of_zeros();
    make_results(values);
    if (is_synchronous_) {
      write(targets_, values);
    } else {
      queue.enqueue(
          [op = op_, arguments = std::move(kernel_arguments_), targets = std::move(targets_)] {
            Stack computed = arguments;
            call_on_cpu(op, computed);
            write(targets, computed);
          },
          StreamQueue::TaskKind::kKernel);
    }
    return std::move(results_);
  }

 private:
  void check_operator() const;
  int find_device() const;
  bool depends_on_values() const;
  void map_arguments();
  Stack values_now() const;
  Stack values_of_zeros() const;
  void make_results(const Stack& values);
  c10::IValue aliased_argument(const c10::Argument& result, const c10::IValue& value);
  static void write(const std::vector<c10::IValue>& targets, const Stack& values);

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack arguments_;
  int device_ = 0;
  bool is_synchronous_ = false;
  Stack kernel_arguments_;            // arguments_, as the kernel takes them
  Stack results_;                     // on the device
  std::vector<c10::IValue> targets_;  // for each result what the kernel copies it to, or None
};

void KernelCall::check_operator() const {
  bool has_generator = false;
  for (const c10::Argument& argument : schema_.arguments()) {
    has_generator |= argument.name() == "generator";
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      has_generator || !op_.hasTag(at::Tag::nondeterministic_seeded),
      "late device: ", schema_.operator_name(),
      " draws random numbers and takes no generator, so a late kernel would draw from the CPU's: "
      "add a kernel to tensor_kernels.cpp");
  for (const c10::Argument& result : schema_.returns()) {
    TORCH_CHECK_NOT_IMPLEMENTED(result.alias_info() == nullptr || result.alias_info()->isWrite(),
                                "late device: ", schema_.operator_name(),
                                " returns a view: add a kernel to tensor_kernels.cpp");
  }
}

int KernelCall::find_device() const {
  std::optional<c10::Device> device;
  bool has_cpu_tensor = false;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const bool is_index = i == 1 && contains(kTakeIndices, schema_.name());
    map_tensors(arguments_[i], [&](const at::Tensor& tensor) {
      if (is_late(tensor)) {
        TORCH_CHECK(!device || *device == tensor.device(), "late device: ", schema_.name(),
                    " has tensors on ", *device, " and on ", tensor.device(),
                    ": copy one of them to the device of the other");
        device = tensor.device();
      } else if (tensor.defined() && tensor.dim() > 0 && !is_index) {
        has_cpu_tensor = true;
      }
      return tensor;
    });
  }
  TORCH_CHECK(!device || !has_cpu_tensor, "late device: ", schema_.name(), " has tensors on ",
              *device, " and on cpu: copy one of them to the device of the other");
  for (const c10::IValue& argument : arguments_) {
    if (!device && argument.isDevice()) device = argument.toDevice();
  }
  return device && device->has_index() ? device->index() : current_device();
}

bool KernelCall::depends_on_values() const {
  if (contains(kDependOnValues, schema_.name())) return true;
  for (const c10::Argument& result : schema_.returns()) {
    if (result.alias_info() == nullptr && !result.type()->isSubtypeOf(*c10::TensorType::get()) &&
        !result.type()->isSubtypeOf(*c10::ListType::ofTensors())) {
      return true;  // a number
    }
  }
  if (!contains(kTakeIndices, schema_.name())) return false;
  for (const std::optional<at::Tensor>& index : arguments_[1].toOptionalTensorList()) {
    if (index && index->defined() &&
        (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) {
      return true;
    }
  }
  return false;
}

// Memory of the device is passed by address, CPU tensors by copy.
void KernelCall::map_arguments() {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const c10::IValue& argument = arguments_[i];
    if (argument.isGenerator()) {
      kernel_arguments_.emplace_back(generator_of_call(argument.toGenerator()));
    } else if (argument.isNone() && schema_.arguments()[i].name() == "generator") {
      kernel_arguments_.emplace_back(generator_of_call(default_generator(device_)));
    } else {
      kernel_arguments_.push_back(map_tensors(argument, [](const at::Tensor& tensor) {
        return is_late(tensor) ? view_for_stream(tensor) : zeros_for(tensor);
      }));
    }
  }
}

Stack KernelCall::values_now() const {
  Stack stack = kernel_arguments_;
  call_on_cpu(op_, stack);
  return stack;
}

Stack KernelCall::values_of_zeros() const {
  Stack stack;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (kernel_arguments_[i].isGenerator()) {
      stack.emplace_back(kernel_arguments_[i].toGenerator().clone());
    } else {
      stack.push_back(map_tensors(arguments_[i], zeros_for));
    }
  }
  try {
    call_on_cpu(op_, stack);
  } catch (c10::Error& error) {
    error.add_context(c10::str("This was thrown when the late device ran ", schema_.operator_name(),
                               " on zeros, to find the shapes of its results."));
    throw;
  }
  return stack;
}

void KernelCall::make_results(const Stack& values) {
  const auto empty_like = [&](const at::Tensor& value) {
    if (!value.defined()) return value;
    return at::empty_strided(value.sizes(), value.strides(),
                             value.options().device(late_device_of(device_)));
  };
  for (size_t i = 0; i < schema_.returns().size(); ++i) {
    const c10::Argument& result = schema_.returns()[i];
    const bool has_memory = values[i].isTensor() || values[i].isTensorList();
    if (result.alias_info() != nullptr) {
      results_.push_back(aliased_argument(result, values[i]));
      targets_.emplace_back();
    } else if (has_memory) {
      results_.push_back(map_tensors(values[i], empty_like));
      targets_.push_back(map_tensors(results_.back(), [](const at::Tensor& tensor) {
        return tensor.defined() ? view_for_stream(tensor) : tensor;
      }));
    } else {
      results_.push_back(values[i]);
      targets_.emplace_back();
    }
  }
}

// Returns the argument that the operator writes and returns. An `out` argument gets the result's
// shape.
c10::IValue KernelCall::aliased_argument(const c10::Argument& result, const c10::IValue& value) {
  for (size_t k = 0; k < arguments_.size(); ++k) {
    const c10::Argument& argument = schema_.arguments()[k];
    if (argument.alias_info() == nullptr ||
        argument.alias_info()->beforeSets() != result.alias_info()->beforeSets()) {
      continue;
    }
    if (argument.is_out() && arguments_[k].isTensor() &&
        value.toTensor().sizes() != arguments_[k].toTensor().sizes()) {
      arguments_[k].toTensor().resize_(value.toTensor().sizes());
      kernel_arguments_[k] = view_for_stream(arguments_[k].toTensor());
    }
    return arguments_[k];
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, "late device: ", schema_.operator_name(),
                              " returns none of its arguments: add a kernel to tensor_kernels.cpp");
}

void KernelCall::write(const std::vector<c10::IValue>& targets, const Stack& values) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].isTensor()) {
      const at::Tensor& target = targets[i].toTensor();
      if (target.defined()) target.copy_(values[i].toTensor());
    } else if (targets[i].isTensorList()) {
      const auto to = targets[i].toTensorVector(), from = values[i].toTensorVector();
      for (size_t k = 0; k < to.size(); ++k) {
        if (to[k].defined()) to[k].copy_(from[k]);
      }
    }
  }
}

}  // namespace

bool is_late(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

at::Tensor view_for_stream(const at::Tensor& tensor) {
  void* const data =
      tensor.numel() == 0 ? nullptr : runtime().memory.host_address(tensor.const_data_ptr());
  const auto options = at::TensorOptions().dtype(tensor.scalar_type());
  return keep_wrapped(at::from_blob(data, tensor.sizes(), tensor.strides(), options), tensor);
}

Stack run_kernel(const c10::OperatorHandle& op, Stack arguments) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return KernelCall(op, std::move(arguments)).run();
}

}  // namespace cadre::testing::late
