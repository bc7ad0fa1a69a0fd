#include "cadre/parallel/shard/shardable.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/group/operands/memory_extent.h"
#include "cadre/tensor/hooks/tensor_version.h"

namespace cadre::shard {
namespace {

[[noreturn]] void refuse_parameter(const std::string& what, const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, format("{}: {}", what, problem));
}

// A tensor and the range of bytes in memory that its elements span.
struct Occupant {
  const NamedTensor* named;
  bool is_moved;
  MemoryExtent extent;
};

// Returns a view of `bytes` that covers the bytes of the tensor's elements. `bytes` stands for the
// memory that begins at address `origin`.
at::Tensor bytes_in(const at::Tensor& bytes, const Occupant& occupant, uintptr_t origin) {
  const at::Tensor& tensor = occupant.named->tensor;
  const auto size = static_cast<int64_t>(tensor.element_size());
  std::vector<int64_t> sizes = tensor.sizes().vec();
  std::vector<int64_t> strides;
  for (const int64_t stride : tensor.strides()) strides.push_back(stride * size);
  sizes.push_back(size);
  strides.push_back(1);
  return bytes.as_strided(sizes, strides, static_cast<int64_t>(occupant.extent.begin - origin));
}

// Returns whether two tensors whose extents overlap have an element in common. Two columns of a
// matrix overlap without a common element.
bool share_elements(const Occupant& first, const Occupant& second) {
  if (first.named->tensor.is_non_overlapping_and_dense() &&
      second.named->tensor.is_non_overlapping_and_dense()) {
    return true;
  }
  const uintptr_t origin = std::min(first.extent.begin, second.extent.begin);
  const auto count = static_cast<int64_t>(std::max(first.extent.end, second.extent.end) - origin);
  const at::NoGradGuard no_grad;
  const at::Tensor bytes = at::zeros({count}, at::kByte);
  bytes_in(bytes, first, origin).fill_(1);
  return bytes_in(bytes, second, origin).any().item<bool>();
}

// Throws if one of the tensors that will be moved shares an element with another tensor. occupants:
// tensors in the same address space.
void check_apart_in_space(const std::string& what, const std::vector<Occupant>& occupants) {
  std::vector<MemoryExtent> extents;
  for (const Occupant& occupant : occupants) extents.push_back(occupant.extent);
  for (const std::vector<size_t>& connected : connected_extents(extents)) {
    for (size_t i = 0; i < connected.size(); ++i) {
      for (size_t k = i + 1; k < connected.size(); ++k) {
        const Occupant& first = occupants[connected[i]];
        const Occupant& second = occupants[connected[k]];
        if (!first.extent.overlaps(second.extent)) break;
        if (!first.is_moved && !second.is_moved) continue;
        if (first.named->tensor.is_same(second.named->tensor)) continue;
        if (!share_elements(first, second)) continue;
        refuse_parameter(
            what,
            format(
                "\"{}\" and \"{}\" share memory, which cannot be kept when their values are moved "
                "into shards; give each its own memory, or register one tensor under both names",
                first.named->name, second.named->name));
      }
    }
  }
}

void check_form(const std::string& what, const NamedTensor& parameter, const ShardedDtypes& rules) {
  const at::Tensor& tensor = parameter.tensor;
  if (!tensor.defined() || tensor.layout() != at::kStrided ||
      (tensor.is_meta() && !rules.may_be_meta)) {
    refuse_parameter(
        what, format("\"{}\" is {}; only dense tensors with values can be sharded", parameter.name,
                     !tensor.defined() ? std::string("undefined")
                                       : "on " + tensor.device().str() + " or not dense"));
  }
  if (!tensor.is_leaf()) {
    refuse_parameter(what, format("\"{}\" is the result of an operation and no leaf of autograd; "
                                  "pass the parameters of a module",
                                  parameter.name));
  }
  if (tensor.scalar_type() != rules.shard) {
    refuse_parameter(
        what,
        format("\"{}\" is {} but the first parameter is {}; put parameters of different "
               "dtypes into different sets",
               parameter.name, c10::toString(tensor.scalar_type()), c10::toString(rules.shard)));
  }
}

// Throws if the parameter has no values, because a wrapper or optimizer has sharded it already.
void check_has_values(const std::string& what, const NamedTensor& parameter) {
  if (parameter.tensor.is_meta()) return;
  if (const auto reason = reason_without_values(parameter.tensor)) {
    refuse_parameter(what, format("the values of \"{}\" are not available; {}. Use that wrapper or "
                                  "optimizer; after its destruction construct the module again",
                                  parameter.name, *reason));
  }
}

bool has_memory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.numel() > 0 &&
         (tensor.is_meta() || !reason_without_values(tensor));
}

}  // namespace

std::optional<std::string_view> reason_without_values(const at::Tensor& parameter) {
  if (parameter.is_meta()) {
    return "the tensor is deferred or on the meta device, and needs materialize() first";
  }
  try {
    static_cast<void>(parameter.const_data_ptr());
    return std::nullopt;
  } catch (const c10::Error&) {
    return "a wrapper or optimizer has sharded them already";
  }
}

void check_apart(const std::string& what, std::span<const NamedTensor> moved,
                 std::span<const NamedTensor> kept) {
  // Tensors by address space. The key is null for the memory of the process, with that of its
  // devices; each storage on the meta device is an address space of its own.
  std::map<const void*, std::vector<Occupant>> spaces;
  const auto add = [&](const NamedTensor& named, bool is_moved) {
    const at::Tensor& tensor = named.tensor;
    const void* const space = tensor.is_meta() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
    spaces[space].push_back(
        {.named = &named, .is_moved = is_moved, .extent = memory_extent(tensor)});
  };
  for (const NamedTensor& named : moved) {
    if (named.tensor.numel() == 0) continue;
    check_has_values(what, named);
    add(named, /*is_moved=*/true);
  }
  for (const NamedTensor& named : kept) {
    if (has_memory(named.tensor)) add(named, /*is_moved=*/false);
  }
  for (const auto& [space, occupants] : spaces) check_apart_in_space(what, occupants);
}

void warn_of_other_holders(LogSink& log, std::string_view component,
                           std::span<const NamedTensor> moved, std::span<const NamedTensor> kept) {
  std::unordered_map<const c10::StorageImpl*, std::unordered_set<const c10::TensorImpl*>> known;
  for (const std::span<const NamedTensor> list : {moved, kept}) {
    for (const NamedTensor& named : list) {
      if (!has_memory(named.tensor) || named.tensor.is_meta()) continue;
      known[named.tensor.storage().unsafeGetStorageImpl()].insert(
          named.tensor.unsafeGetTensorImpl());
    }
  }
  const NamedTensor* first = nullptr;
  size_t num_held = 0;
  for (const NamedTensor& named : moved) {
    if (!has_memory(named.tensor) || named.tensor.is_meta()) continue;
    const c10::Storage& storage = named.tensor.storage();
    if (storage.use_count() <= known[storage.unsafeGetStorageImpl()].size()) continue;
    ++num_held;
    if (first == nullptr) first = &named;
  }
  if (first == nullptr) return;
  log.write(LogLevel::kWarning, component,
            format("tensors that are not registered share memory with parameters first=\"{}\" "
                   "parameters={} effect=\"the parameters get other memory, so a member made by "
                   "detach(), a view or a slice, or the weight of another module keeps the old "
                   "values; make such a tensor from the parameter in each forward()\"",
                   first->name, num_held));
}

void check_shardable(const std::string& what, const std::vector<NamedTensor>& parameters,
                     const ShardedDtypes& rules) {
  for (const NamedTensor& parameter : parameters) check_form(what, parameter, rules);
  wrap::refuse_inference_mode(what);
  wrap::refuse_inference_tensors(what, parameters);
  for (const at::ScalarType dtype : {rules.shard, rules.compute}) {
    if (to_dtype(dtype)) continue;
    refuse_parameter(what, format("the dtype {} cannot be sent between ranks; supported are {}",
                                  c10::toString(dtype), dtype_names()));
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const NamedTensor& parameter = parameters[i];
    if (rules.compute != rules.shard && parameter.tensor.grad().defined()) {
      refuse_parameter(
          what, format("\"{}\" has a gradient in {}, and sharding would change the parameter's "
                       "dtype to {}; call zero_grad() before",
                       parameter.name, c10::toString(rules.shard), c10::toString(rules.compute)));
    }
    for (size_t k = 0; k < i; ++k) {
      if (!parameters[k].tensor.is_same(parameter.tensor)) continue;
      refuse_parameter(what, format("\"{}\" and \"{}\" are one tensor; pass it once",
                                    parameters[k].name, parameter.name));
    }
  }
  check_apart(what, parameters);
}

}  // namespace cadre::shard
