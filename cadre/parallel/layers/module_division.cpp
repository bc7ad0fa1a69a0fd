#include "cadre/parallel/layers/module_division.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/division/parameter_division.h"
#include "cadre/parallel/shard/shardable.h"
#include "cadre/tensor/group/operands/memory_extent.h"
#include "cadre/tensor/hooks/device_check.h"
#include "cadre/tensor/hooks/shard_mark.h"
#include "cadre/tensor/hooks/tensor_version.h"

namespace cadre::layers {

ModuleDivision::ModuleDivision(const torch::nn::Module& module, const DeviceMesh& mesh,
                               std::string axis, const DividedParameters& divided,
                               std::string_view caller)
    : module_(module), mesh_(mesh), axis_(std::move(axis)), divided_(divided), caller_(caller) {}

void ModuleDivision::refuse(const std::string& problem) const {
  throw Error(ErrorCode::kInvalidArgument, format("{}: {}", caller_, problem));
}

std::optional<int64_t> ModuleDivision::divided_dim(const at::Tensor& parameter) const {
  const auto known = divided_.find(parameter.unsafeGetTensorImpl());
  return known == divided_.end() ? std::nullopt : known->second.dim;
}

ParameterShard ModuleDivision::record_of(const NamedTensor& parameter) const {
  const auto known = divided_.find(parameter.tensor.unsafeGetTensorImpl());
  const std::optional<int64_t> dim = divided_dim(parameter.tensor);
  std::vector<Placement> placements;
  for (const MeshAxis& axis : mesh_.axes()) {
    placements.push_back(dim && axis.name == axis_ ? Placement(Shard(*dim)) : Replicate());
  }
  return {.name = parameter.name,
          .sizes = known == divided_.end() ? parameter.tensor.sizes().vec() : known->second.sizes,
          .mesh = mesh_,
          .placements = std::move(placements),
          .flat_axis = {},
          .range = {.begin = 0, .end = parameter.tensor.numel()},
          .values = parameter.tensor,
          .parameter = parameter.tensor};
}

ParameterShard ModuleDivision::joint_record_of(const NamedTensor& parameter) const {
  return shard::on_joint_mesh(record_of(parameter), shard::division_of(parameter).get());
}

bool ModuleDivision::is_cut(const NamedTensor& parameter) const {
  return divided_dim(parameter.tensor) && mesh_.size(axis_) > 1;
}

void ModuleDivision::check(std::optional<c10::Device> of_group) const {
  const std::vector<NamedTensor> parameters = distinct_parameters(module_);
  wrap::refuse_inference_mode(caller_);
  wrap::refuse_inference_tensors(caller_, parameters);
  std::vector<NamedTensor> tensors = parameters;
  std::ranges::copy(distinct_buffers(module_), std::back_inserter(tensors));
  wrap::check_devices(caller_, tensors, of_group);
  check_values(tensors);
  for (const NamedTensor& parameter : parameters) {
    if (!is_cut(parameter)) {
      static_cast<void>(joint_record_of(parameter));
    } else if (wrap::shard_mark_of(parameter.tensor) != nullptr) {
      refuse(format("\"{}\" is a shard already ({}); divide a parameter once", parameter.name,
                    wrap::shard_mark_of(parameter.tensor)->owner));
    }
  }
  check_memory(std::move(tensors));
}

void ModuleDivision::check_values(const std::vector<NamedTensor>& tensors) const {
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.has_storage()) continue;
    const auto reason = shard::reason_without_values(tensor);
    if (!reason) continue;
    refuse(
        format("the values of \"{}\" are not available; {}. Divide a module before it is wrapped",
               name, *reason));
  }
}

void ModuleDivision::check_memory(std::vector<NamedTensor> tensors) const {
  std::erase_if(tensors, [](const NamedTensor& named) {
    return named.tensor.numel() == 0 || !named.tensor.has_storage();
  });
  std::vector<MemoryExtent> extents;
  for (const NamedTensor& named : tensors) extents.push_back(memory_extent(named.tensor));
  for (const std::vector<size_t>& connected : connected_extents(extents)) {
    if (connected.size() == 1) continue;
    const auto cut = std::ranges::find_if(
        connected, [&](size_t i) { return divided_dim(tensors[i].tensor).has_value(); });
    if (cut == connected.end()) continue;
    const auto other = std::ranges::find_if(
        connected, [&](size_t i) { return i != *cut && extents[i].overlaps(extents[*cut]); });
    refuse(
        format("\"{}\" and \"{}\" share memory, and a rank keeps its part of the first in separate "
               "memory, so that the two would no longer be equal; make them one tensor that is "
               "registered under both names, or give each its own memory",
               tensors[*cut].name, tensors[*other].name));
  }
}

std::vector<ParameterShard> ModuleDivision::keep_records() const {
  std::vector<ParameterShard> records;
  for (const NamedTensor& parameter : distinct_parameters(module_)) {
    if (is_cut(parameter)) {
      records.push_back(record_of(parameter));
      shard::keep_division(records.back());
    } else {
      records.push_back(joint_record_of(parameter));
    }
  }
  return records;
}

}  // namespace cadre::layers
