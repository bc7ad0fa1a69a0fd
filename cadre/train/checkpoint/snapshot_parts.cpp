#include "cadre/train/checkpoint/snapshot_parts.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "cadre/parallel/shard/division/boxes.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/hooks/shard_mark.h"

namespace cadre {
namespace {

std::vector<SnapshotTensor> buffers_of(const torch::nn::Module& module) {
  std::vector<SnapshotTensor> buffers;
  for (const auto& [name, tensor] : distinct_buffers(module)) {
    buffers.push_back(whole_tensor(name, tensor));
  }
  return buffers;
}

// Returns the SnapshotTensor of a parameter that has no ParameterShard, so it must be whole.
SnapshotTensor whole_parameter(const NamedTensor& parameter) {
  wrap::refuse_shard_as_whole(
      parameter.name, parameter.tensor, "parts_of",
      "Pass the records of what divided it: cadre::parts_of(records, module), where records is the "
      "result of parallelize_module() or parameter_shards() of the outermost wrapper");
  return whole_tensor(parameter.name, parameter.tensor);
}

}  // namespace

SnapshotTensor whole_tensor(std::string name, const at::Tensor& tensor) {
  const std::vector<int64_t> sizes = tensor.sizes().vec();
  const Box box{std::vector<int64_t>(sizes.size(), 0), sizes};
  return {.name = std::move(name), .sizes = sizes, .boxes = {box}, .values = tensor};
}

SnapshotTensor part_of(const ParameterShard& shard) {
  return {.name = shard.name,
          .sizes = shard.sizes,
          .boxes = shard::boxes_of(shard),
          .values = shard.values,
          .memory = shard.memory,
          .is_copy = shard.is_copy};
}

at::Tensor slice_of(at::Tensor tensor, const Box& box, const Box& part) {
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    tensor = tensor.narrow(static_cast<int64_t>(dim), part.offsets[dim] - box.offsets[dim],
                           part.sizes[dim]);
  }
  return tensor;
}

SnapshotParts without_copies(const SnapshotParts& parts) {
  SnapshotParts kept = parts;
  const SnapshotEntries entries = entries_of(parts.parameters);
  std::erase_if(kept.optimizer, [&](const ParameterState& state) {
    const auto found = entries.find({state.parameter, state.entry});
    return found != entries.end() && found->second->is_copy;
  });
  // `entry` numbers the entries of one name. Only one entry of each name is left, so its number
  // becomes 0.
  for (ParameterState& state : kept.optimizer) state.entry = 0;
  std::erase_if(kept.parameters, [](const SnapshotTensor& tensor) { return tensor.is_copy; });
  return kept;
}

SnapshotEntries entries_of(std::span<const SnapshotTensor> parameters) {
  SnapshotEntries entries;
  std::map<std::string, size_t> num_of_name;
  for (const SnapshotTensor& tensor : parameters) {
    entries.emplace(std::pair(tensor.name, num_of_name[tensor.name]++), &tensor);
  }
  return entries;
}

SnapshotParts parts_of(const torch::nn::Module& module) {
  SnapshotParts parts = {.buffers = buffers_of(module)};
  for (const NamedTensor& parameter : distinct_parameters(module)) {
    parts.parameters.push_back(whole_parameter(parameter));
  }
  return parts;
}

SnapshotParts parts_of(std::span<const ParameterShard> shards) {
  SnapshotParts parts;
  for (const ParameterShard& shard : shards) parts.parameters.push_back(part_of(shard));
  return parts;
}

SnapshotParts parts_of(std::span<const ParameterShard> shards, const torch::nn::Module& module) {
  SnapshotParts parts = parts_of(shards);
  parts.buffers = buffers_of(module);
  for (const NamedTensor& parameter : distinct_parameters(module)) {
    const bool is_recorded = std::ranges::any_of(
        shards, [&](const ParameterShard& shard) { return shard.name == parameter.name; });
    if (!is_recorded) parts.parameters.push_back(whole_parameter(parameter));
  }
  return parts;
}

}  // namespace cadre
