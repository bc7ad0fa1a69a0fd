// The operators that the late device does not take from the CPU as they are: new tensors, views,
// copies, values that the host reads, and those for which libtorch gives PrivateUse1 operators of
// its own. All others run by run_kernel().
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cadre/testing/torch/late_device/kernel_call.h"
#include "cadre/testing/torch/late_device/runtime.h"

namespace cadre::testing::late {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device device_for(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : late_device_of(current_device());
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                               std::optional<c10::Layout> /*layout*/,
                               std::optional<c10::Device> device, std::optional<bool> /*pinned*/,
                               std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_for(device));
  return at::detail::empty_generic(size, &runtime().allocator, kKeys, c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout> /*layout*/, std::optional<c10::Device> device,
                         std::optional<bool> /*pinned*/) {
  const c10::DeviceGuard guard(device_for(device));
  return at::detail::empty_strided_generic(size, stride, &runtime().allocator, kKeys,
                                           c10::dtype_or_default(dtype));
}

// Replaces at::native::resize_, which copies on the host.
const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size,
                         std::optional<c10::MemoryFormat> format) {
  c10::TensorImpl& impl = *self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl.set_sizes_contiguous(size);
    const size_t num_bytes = at::detail::computeStorageNbytesContiguous(
        size, self.element_size(), static_cast<size_t>(self.storage_offset()));
    if (num_bytes > self.storage().nbytes()) {
      at::native::resize_bytes_nocuda(self.storage(), static_cast<int64_t>(num_bytes));
    }
  }
  if (format) impl.empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset,
                        c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(storage), offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

// TensorImpl's own rule does not know PrivateUse1, so Module::to() would throw.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || is_late(tensor));
  };
  return is_dense(self) && is_dense(from);
}

void record_stream(at::Tensor& self, at::Stream stream) {
  runtime().allocator.recordStream(self.storage().data_ptr(), stream);
}

void enqueue_copy(StreamQueue& queue, const at::Tensor& from, const at::Tensor& to) {
  queue.enqueue(
      [from, to] {
        const at::NoGradGuard no_grad;
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        to.copy_(from);
      },
      StreamQueue::TaskKind::kKernel);
}

void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  StreamQueue& queue = current_queue(to.device().index());
  if (from.device() == to.device()) {
    enqueue_copy(queue, view_for_stream(from), view_for_stream(to));
    return;
  }
  // The copy runs on the source's stream. The target's stream is ahead of it and behind it, as on
  // CUDA.
  StreamQueue& source = current_queue(from.device().index());
  source.wait_event(queue.record());
  enqueue_copy(source, view_for_stream(from), view_for_stream(to));
  queue.wait_event(source.record());
}

// A tensor over the same memory that keeps nothing alive.
at::Tensor view_of_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.scalar_type()));
}

// Announces a use of pinned memory on the current stream of the device.
void record_pinned_use(const at::Tensor& tensor, int device) {
  void* const data = const_cast<void*>(tensor.const_data_ptr());
  const c10::Stream stream(c10::Stream::UNSAFE, late_device_of(device), current_stream(device));
  runtime().pinned.record_event(data, data, stream);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool is_non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
  const int device = (is_late(to) ? to : from).device().index();
  runtime().counters.add_kernel(device);
  if (is_late(from) && is_late(to)) {
    copy_on_device(from, to);
    return to;
  }
  const bool is_to_host = is_late(from);
  const at::Tensor& host = is_to_host ? to : from;
  const bool is_pinned = host.numel() > 0 && runtime().pinned.contains(host.const_data_ptr());
  StreamQueue& queue = current_queue(device);
  if (is_to_host) {
    enqueue_copy(queue, view_for_stream(from), view_of_host(to));
  } else {
    // Pageable memory is read before this returns.
    enqueue_copy(queue, is_pinned ? view_of_host(from) : from.clone(), view_for_stream(to));
  }
  if (!is_non_blocking || (is_to_host && !is_pinned)) {
    runtime().counters.add_synchronous(device, is_to_host ? "copy to host" : "copy to device");
    queue.synchronize();
  } else if (is_pinned) {
    record_pinned_use(host, device);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const int device = self.device().index();
  runtime().counters.add_synchronous(device, "aten::_local_scalar_dense");
  current_queue(device).synchronize();
  return view_for_stream(self).item();
}

// Checks the value on the stream, so that a wrong one is reported by the next synchronisation.
void assert_async(const at::Tensor& self, c10::string_view message) {
  const int device = self.device().index();
  runtime().counters.add_kernel(device);
  current_queue(device).enqueue(
      [value = view_for_stream(self), message = std::string(message)] {
        TORCH_CHECK(value.item<bool>(), message);
      },
      StreamQueue::TaskKind::kKernel);
}

// Scaled dot product attention computed by its parts (SDPBackend::math).
int64_t fused_sdp_choice(const at::Tensor& /*query*/, const at::Tensor& /*key*/,
                         const at::Tensor& /*value*/, const std::optional<at::Tensor>& /*mask*/,
                         double /*dropout*/, bool /*is_causal*/, std::optional<double> /*scale*/,
                         bool /*enable_gqa*/) {
  return 0;
}

// The CPU's kernel has no generator argument.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  const auto options = input.options().dtype(at::kBool);
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, options)};
  const at::Tensor mask = at::empty_like(input, options).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

// Replaces the arguments of `called`, which are on the stack, by the results of `op`.
void run_on_stack(const c10::OperatorHandle& called, const c10::OperatorHandle& op,
                  torch::jit::Stack arguments, torch::jit::Stack& stack) {
  torch::jit::Stack results = run_kernel(op, std::move(arguments));
  torch::jit::drop(stack, called.schema().arguments().size());
  for (c10::IValue& result : results) stack.push_back(std::move(result));
}

torch::jit::Stack arguments_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return torch::jit::last(stack, op.schema().arguments().size()).vec();
}

void run_any(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_on_stack(op, op, arguments_of(op, *stack), *stack);
}

void convolution(const c10::OperatorHandle& called, torch::jit::Stack* stack) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_on_stack(called, op, arguments_of(called, *stack), *stack);
}

void convolution_backward(const c10::OperatorHandle& called, torch::jit::Stack* stack) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  torch::jit::Stack arguments = arguments_of(called, *stack);
  // The operator of other backends has no argument for the sizes of the bias.
  const std::vector<int64_t> bias_sizes = {arguments[0].toTensor().size(1)};
  arguments.insert(arguments.begin() + 3, c10::IValue(bias_sizes));
  run_on_stack(called, op, std::move(arguments), *stack);
}

}  // namespace

void register_kernels() {
  // libtorch calls the kernels until the process ends.
  torch::Library& m =
      *std::make_unique<torch::Library>(MAKE_TORCH_LIBRARY_IMPL(aten, PrivateUse1)).release();
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("_assert_async.msg", assert_async);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  torch::Library& all =
      *std::make_unique<torch::Library>(MAKE_TORCH_LIBRARY_IMPL(_, PrivateUse1)).release();
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&run_any>());
}

}  // namespace cadre::testing::late
