#include "cadre/shard/shardable.h"

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <string_view>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/group/dtype.h"
#include "cadre/group/operands/memory_extent.h"

namespace cadre::shard {
namespace {

[[noreturn]] void refuse_parameter(const std::string& what, const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, format("{}: {}", what, problem));
}

void check_form(const std::string& what, const NamedTensor& parameter, at::ScalarType dtype) {
  const at::Tensor& tensor = parameter.tensor;
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.device().is_cpu()) {
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
  if (tensor.scalar_type() != dtype) {
    refuse_parameter(
        what, format("\"{}\" is {} but the first parameter is {}; put parameters of different "
                     "dtypes into different sets",
                     parameter.name, c10::toString(tensor.scalar_type()), c10::toString(dtype)));
  }
}

void check_apart(const std::string& what, const std::vector<NamedTensor>& parameters) {
  std::vector<MemoryExtent> extents;
  std::vector<std::string_view> names;
  for (const auto& [name, tensor] : parameters) {
    if (tensor.numel() == 0) continue;
    if (const auto reason = reason_without_values(tensor)) {
      refuse_parameter(what, format("the values of \"{}\" are not there; {}. Destroy that one "
                                    "first, or use it",
                                    name, *reason));
    }
    extents.push_back(memory_extent(tensor));
    names.push_back(name);
  }
  for (const std::vector<size_t>& connected : connected_extents(extents)) {
    if (connected.size() == 1) continue;
    refuse_parameter(
        what, format("\"{}\" and \"{}\" share memory, and only one place can hold it; give them "
                     "memory of their own, or make them one tensor under two names and pass it "
                     "once",
                     names[connected[0]], names[connected[1]]));
  }
}

}  // namespace

std::optional<std::string_view> reason_without_values(const at::Tensor& parameter) {
  if (parameter.is_meta()) {
    return "it is deferred or on the meta device, and needs materialize() first";
  }
  try {
    static_cast<void>(parameter.const_data_ptr());
    return std::nullopt;
  } catch (const c10::Error&) {
    return "a wrapper or optimizer has sharded them already";
  }
}

void check_shardable(const std::string& what, const std::vector<NamedTensor>& parameters,
                     const ShardedDtypes& dtypes) {
  for (const NamedTensor& parameter : parameters) check_form(what, parameter, dtypes.shard);
  for (const at::ScalarType dtype : {dtypes.shard, dtypes.compute}) {
    if (to_dtype(dtype)) continue;
    refuse_parameter(what, format("{} cannot be exchanged; supported are {}", c10::toString(dtype),
                                  dtype_names()));
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const NamedTensor& parameter = parameters[i];
    if (dtypes.compute != dtypes.shard && parameter.tensor.grad().defined()) {
      refuse_parameter(
          what, format("\"{}\" has a gradient in {}, and its values become {}; call "
                       "zero_grad() before",
                       parameter.name, c10::toString(dtypes.shard), c10::toString(dtypes.compute)));
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
