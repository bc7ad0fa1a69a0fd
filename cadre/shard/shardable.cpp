#include "cadre/shard/shardable.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/group/dtype.h"

namespace cadre::shard {
namespace {

[[noreturn]] void refuse_parameter(const std::string& what, const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, format("{}: {}", what, problem));
}

// The bytes from the first to the last element of a tensor, in the memory of the process or, on
// the meta device, in its storage.
struct Extent {
  const NamedTensor* named;
  bool is_moved;
  const void* space;  // the storage on the meta device; null for memory of the process
  uintptr_t begin;
  uintptr_t end;
};

Extent extent_of(const NamedTensor& named, bool is_moved) {
  const at::Tensor& tensor = named.tensor;
  const auto size = static_cast<int64_t>(tensor.element_size());
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const void* const space = tensor.is_meta() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
  const auto begin = tensor.is_meta() ? static_cast<uintptr_t>(tensor.storage_offset() * size)
                                      : reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return {.named = &named,
          .is_moved = is_moved,
          .space = space,
          .begin = begin,
          .end = begin + static_cast<uintptr_t>((last + 1) * size)};
}

// The bytes of the tensor's elements as a view of `bytes`, whose first byte is at `origin`.
at::Tensor bytes_in(const at::Tensor& bytes, const Extent& extent, uintptr_t origin) {
  const at::Tensor& tensor = extent.named->tensor;
  const auto size = static_cast<int64_t>(tensor.element_size());
  std::vector<int64_t> sizes = tensor.sizes().vec();
  std::vector<int64_t> strides;
  for (const int64_t stride : tensor.strides()) strides.push_back(stride * size);
  sizes.push_back(size);
  strides.push_back(1);
  return bytes.as_strided(sizes, strides, static_cast<int64_t>(extent.begin - origin));
}

// Whether tensors whose extents overlap have an element in common: columns of a matrix have none.
bool share_elements(const Extent& first, const Extent& second) {
  const uintptr_t origin = std::min(first.begin, second.begin);
  const auto count = static_cast<int64_t>(std::max(first.end, second.end) - origin);
  const at::NoGradGuard no_grad;
  const at::Tensor bytes = at::zeros({count}, at::kByte);
  bytes_in(bytes, first, origin).fill_(1);
  return bytes_in(bytes, second, origin).any().item<bool>();
}

void check_form(const std::string& what, const NamedTensor& parameter, const ShardedDtypes& rules) {
  const at::Tensor& tensor = parameter.tensor;
  if (!tensor.defined() || tensor.layout() != at::kStrided ||
      !(tensor.is_cpu() || (rules.may_be_meta && tensor.is_meta()))) {
    refuse_parameter(
        what,
        format("\"{}\" is {}; only dense CPU tensors with values can be sharded", parameter.name,
               !tensor.defined() ? std::string("undefined")
                                 : "on " + tensor.device().str() + " or not dense"));
  }
  if (!tensor.is_leaf()) {
    refuse_parameter(
        what, format("\"{}\" is the result of an operation and no leaf; pass the parameters of "
                     "a module",
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

// Throws for a parameter that is sharded already.
void check_has_values(const std::string& what, const NamedTensor& parameter) {
  if (parameter.tensor.is_meta() || has_values(parameter.tensor)) return;
  refuse_parameter(what,
                   format("the values of \"{}\" are not there; a wrapper or optimizer has sharded "
                          "them already. Use that one; when it is gone, construct the module again",
                          parameter.name));
}

bool has_memory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.numel() > 0 &&
         (tensor.is_meta() || (tensor.is_cpu() && has_values(tensor)));
}

}  // namespace

bool has_values(const at::Tensor& parameter) {
  try {
    static_cast<void>(parameter.const_data_ptr());
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

void check_apart(const std::string& what, std::span<const NamedTensor> moved,
                 std::span<const NamedTensor> kept) {
  std::vector<Extent> extents;
  for (const NamedTensor& named : moved) {
    if (named.tensor.numel() == 0) continue;
    check_has_values(what, named);
    extents.push_back(extent_of(named, /*is_moved=*/true));
  }
  for (const NamedTensor& named : kept) {
    if (has_memory(named.tensor)) extents.push_back(extent_of(named, /*is_moved=*/false));
  }
  std::ranges::stable_sort(extents, {}, [](const Extent& extent) {
    return std::pair(reinterpret_cast<uintptr_t>(extent.space), extent.begin);
  });
  for (size_t i = 0; i < extents.size(); ++i) {
    const Extent& first = extents[i];
    for (size_t k = i + 1; k < extents.size(); ++k) {
      const Extent& second = extents[k];
      if (second.space != first.space || second.begin >= first.end) break;
      if (!first.is_moved && !second.is_moved) continue;
      if (first.named->tensor.is_same(second.named->tensor)) continue;
      if (!share_elements(first, second)) continue;
      refuse_parameter(what, format("\"{}\" and \"{}\" share memory, and only one place can hold "
                                    "it; give them memory of their own, or make them one tensor "
                                    "that is registered under both names",
                                    first.named->name, second.named->name));
    }
  }
}

void check_shardable(const std::string& what, const std::vector<NamedTensor>& parameters,
                     const ShardedDtypes& rules) {
  for (const NamedTensor& parameter : parameters) check_form(what, parameter, rules);
  for (const at::ScalarType dtype : {rules.shard, rules.compute}) {
    if (to_dtype(dtype)) continue;
    refuse_parameter(what, format("{} cannot be exchanged; supported are {}", c10::toString(dtype),
                                  dtype_names()));
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const NamedTensor& parameter = parameters[i];
    if (rules.compute != rules.shard && parameter.tensor.grad().defined()) {
      refuse_parameter(
          what, format("\"{}\" has a gradient in {}, and its values become {}; call "
                       "zero_grad() before",
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
