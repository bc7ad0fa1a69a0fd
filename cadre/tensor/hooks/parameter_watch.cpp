#include "cadre/tensor/hooks/parameter_watch.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/hooks/tensor_version.h"

namespace cadre::wrap {

namespace {

// Gives access to the registered parameters. named_parameters() would copy them and their names
// into a new dictionary, which would cost more in each forward than everything else here.
struct Registered : torch::nn::Module {
  static const torch::OrderedDict<std::string, at::Tensor>& of(const torch::nn::Module& module) {
    return module.*(&Registered::parameters_);
  }
};

// Calls `visit` for each parameter in the order of named_parameters(), and stops when it returns
// false. Returns whether it always returned true.
template <typename Visit>
bool visit_parameters(const torch::nn::Module& module, const Visit& visit) {
  for (const auto& item : Registered::of(module)) {
    if (item.value().defined() && !visit(item.value())) return false;
  }
  for (const auto& child : module.children()) {
    if (!visit_parameters(*child, visit)) return false;
  }
  return true;
}

std::string text_of(const at::Tensor& tensor) {
  return format("{} {}, strides {}, on {}", c10::toString(tensor.scalar_type()),
                list_of(tensor.sizes()), list_of(tensor.strides()), tensor.device().str());
}

}  // namespace

ParameterWatch::ParameterWatch(std::shared_ptr<const torch::nn::Module> module)
    : module_(std::move(module)) {
  for (const auto& item : module_->named_parameters()) {
    const at::Tensor& tensor = item.value();
    known_.push_back({.name = item.key(),
                      .tensor = tensor,
                      .dtype = tensor.scalar_type(),
                      .device = tensor.device(),
                      .sizes = tensor.sizes().vec(),
                      .strides = tensor.strides().vec(),
                      .requires_grad = tensor.requires_grad(),
                      .text = text_of(tensor)});
  }
}

std::optional<std::string> ParameterWatch::change() const {
  if (auto change = change_of_list()) return change;
  for (const Known& known : known_) {
    if (auto change = change_of(known)) return change;
  }
  return std::nullopt;
}

bool ParameterWatch::has_the_same_list() const {
  size_t next = 0;
  const bool all_known = visit_parameters(*module_, [this, &next](const at::Tensor& tensor) {
    return next < known_.size() && tensor.is_same(known_[next++].tensor);
  });
  return all_known && next == known_.size();
}

std::optional<std::string> ParameterWatch::change_of_list() const {
  if (has_the_same_list()) return std::nullopt;
  const auto current = module_->named_parameters();
  for (const auto& item : current) {
    const auto known = std::find_if(known_.begin(), known_.end(), [&item](const Known& candidate) {
      return candidate.name == item.key();
    });
    if (known == known_.end()) return format("\"{}\" was added", item.key());
    if (!item.value().is_same(known->tensor)) {
      return format("\"{}\" was replaced by another tensor", item.key());
    }
  }
  for (const Known& known : known_) {
    if (!current.contains(known.name)) return format("\"{}\" was removed", known.name);
  }
  return std::nullopt;  // only the order has changed
}

std::optional<std::string> ParameterWatch::change_of(const Known& known) {
  const at::Tensor& tensor = known.tensor;
  if (tensor.scalar_type() != known.dtype || tensor.device() != known.device ||
      tensor.sizes() != known.sizes || tensor.strides() != known.strides) {
    return format("\"{}\" was {} and is {} now", known.name, known.text, text_of(tensor));
  }
  if (!known.requires_grad && tensor.requires_grad()) {
    return format("\"{}\" was frozen and requires grad now", known.name);
  }
  return std::nullopt;
}

WriteWatch::WriteWatch(std::vector<NamedTensor> parameters) : parameters_(std::move(parameters)) {
  begin();
}

WriteWatch::Seen WriteWatch::now(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return {.version = version_of(tensor),
          .storage = impl.unsafe_storage().unsafeGetStorageImpl(),
          .offset = impl.storage_offset()};
}

void WriteWatch::begin() {
  seen_.clear();
  for (const NamedTensor& parameter : parameters_) seen_.push_back(now(parameter.tensor));
}

std::vector<size_t> WriteWatch::written() const {
  std::vector<size_t> written;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (now(parameters_[i].tensor) != seen_[i]) written.push_back(i);
  }
  return written;
}

uint32_t WriteWatch::num_writes() const {
  uint32_t sum = 0;
  for (const NamedTensor& parameter : parameters_) sum += version_of(parameter.tensor);
  return sum;
}

uint64_t WriteWatch::samples(uint64_t turn) const {
  // 2^64 / golden ratio. With this stride, calls with successive `turn` values sample elements that
  // are spread over the whole tensor.
  constexpr uint64_t kStride = 0x9E3779B97F4A7C15;
  Fnv1a digest;
  for (const NamedTensor& parameter : parameters_) {
    const at::Tensor& tensor = parameter.tensor;
    // The host would have to wait for a device.
    if (tensor.numel() == 0 || !tensor.is_cpu()) continue;
    const auto numel = static_cast<uint64_t>(tensor.numel());
    // The index of the sampled element in memory. It is 0 if the memory has gaps between elements,
    // because another index could be that of a gap.
    const uint64_t element =
        tensor.is_non_overlapping_and_dense() ? (numel / 2 + turn * kStride) % numel : 0;
    const size_t size = tensor.element_size();
    const auto* const bytes = static_cast<const char*>(tensor.const_data_ptr()) + element * size;
    digest.add(std::string_view(bytes, size));
  }
  return digest.value();
}

}  // namespace cadre::wrap
