#include "cadre/parallel/buckets/refused_gradients.h"

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <utility>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

// Returns a tensor with the sizes of `like` and without memory. An access to its values throws
// `sentence`.
at::Tensor untouchable(const at::Tensor& like, const std::string& sentence) {
  const at::ScalarType dtype = like.scalar_type();
  const auto num_bytes = like.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(num_bytes),
                       at::DataPtr(nullptr, like.device()), /*allocator=*/nullptr,
                       /*resizable=*/false);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(sentence);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, std::nullopt, like.device())),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(like.sizes());
  return tensor;
}

}  // namespace

RefusedGradients::RefusedGradients(const std::vector<NamedTensor>& parameters, const Owner& owner,
                                   Events events)
    : events_(std::move(events)), is_installed_(parameters.size(), false) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const NamedTensor& parameter = parameters[i];
    parameters_.push_back(parameter.tensor);
    sentences_.push_back(
        format("{}: the gradient of the module's parameter \"{}\" is gone, because it was reduced "
               "to the gradients of the ranks' shards. {}; read gradients from the wrapper's "
               "parameter_shards(), and let zero_grad() set gradients to none.",
               owner.place, parameter.name, owner.remedy));
    // This hook removes the placeholder gradients before autograd adds to one of them. Usually they
    // were removed earlier in the backward, at an output of the wrapper, but the gradient of a
    // regularizer may reach a parameter before that.
    hooks_.push_back(parameter.tensor.register_hook([this, i](const at::Tensor&) {
      remove();
      events_.on_arrival(i);
    }));
  }
}

RefusedGradients::~RefusedGradients() {
  discard();
  for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].remove_hook(hooks_[i]);
}

void RefusedGradients::install() {
  if (refused_.empty()) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      refused_.push_back(untouchable(parameters_[i], sentences_[i]));
    }
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].mutable_grad();
    is_installed_[i] = !gradient.defined();
    if (is_installed_[i]) gradient = refused_[i];
  }
  are_installed_ = true;
}

// Also returns true for a detach() of the placeholder, which zero_grad(set_to_none=false) leaves
// behind when it throws. Compares the addresses of the storages, because at::Tensor::is_alias_of()
// accesses them, which throws.
bool RefusedGradients::is_refused(size_t parameter) const {
  const at::Tensor& gradient = parameters_[parameter].grad();
  if (!gradient.defined() || refused_.empty()) return false;
  const auto storage_of = [](const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  };
  return storage_of(gradient) == storage_of(refused_[parameter]);
}

void RefusedGradients::remove() {
  if (!std::exchange(are_installed_, false)) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_installed_[i]) continue;
    if (!parameters_[i].grad().defined()) {
      events_.on_cleared(i);
    } else if (is_refused(i)) {
      parameters_[i].mutable_grad().reset();
    }
  }
}

void RefusedGradients::discard() {
  if (!std::exchange(are_installed_, false)) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (is_refused(i)) parameters_[i].mutable_grad().reset();
  }
}

}  // namespace cadre
