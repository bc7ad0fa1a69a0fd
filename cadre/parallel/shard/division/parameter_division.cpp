#include "cadre/parallel/shard/division/parameter_division.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/hooks/shard_mark.h"
#include "cadre/tensor/mesh/whole_axes.h"

namespace cadre::shard {

// Returns the groups in the order of the list, which is the same on all ranks.
std::vector<ProcessGroup> dividing_groups(std::span<const ParameterShard> shards) {
  std::vector<ProcessGroup> groups;
  for (const ParameterShard& shard : shards) {
    for (size_t i = 0; i < shard.placements.size(); ++i) {
      const MeshAxis& axis = shard.mesh.axes()[i];
      const bool is_divided = shard.placements[i].shard() != nullptr ||
                              shard.flat_axis == axis.name || shard.stage_axis == axis.name;
      if (!is_divided || axis.size == 1) continue;
      const ProcessGroup& group = shard.mesh.group(axis.name);
      const bool is_known = std::ranges::any_of(groups, [&](const ProcessGroup& known) {
        return &known.communicator() == &group.communicator();
      });
      if (!is_known) groups.push_back(group);
    }
  }
  return groups;
}

void keep_division(const ParameterShard& record) {
  const wrap::ShardMark* const known = wrap::shard_mark_of(record.parameter);
  if (known == nullptr) {
    throw Error(ErrorCode::kInternal,
                format("\"{}\" is divided, but not marked as a shard", record.name));
  }
  wrap::ShardMark mark = *known;
  mark.division = std::make_shared<const ParameterDivision>(
      ParameterDivision{record.sizes, record.mesh, record.placements});
  wrap::mark_as_shard(record.parameter, std::move(mark));
}

std::shared_ptr<const ParameterDivision> division_of(const NamedTensor& parameter) {
  const wrap::ShardMark* const mark = wrap::shard_mark_of(parameter.tensor);
  if (mark == nullptr || mark->division) return mark == nullptr ? nullptr : mark->division;
  throw Error(
      ErrorCode::kInvalidArgument,
      format("\"{}\" is the shard of rank {} ({}), and it is not known along which axis: to "
             "shard it further, or to put it into a pipeline, divide its layer with "
             "parallelize_module(module, mesh[axis], plan)",
             parameter.name, mark->rank, mark->owner));
}

ParameterShard on_joint_mesh(ParameterShard record, const ParameterDivision* division) {
  if (division == nullptr) return record;
  const DeviceMesh mesh = record.mesh.joined_with(division->mesh);
  std::vector<Placement> placements;
  const auto placement_in = [](const DeviceMesh& own, const std::vector<Placement>& given,
                               const MeshAxis& axis) -> std::optional<Placement> {
    const auto found = std::ranges::find(own.axes(), axis);
    if (found == own.axes().end()) return std::nullopt;
    return given[static_cast<size_t>(found - own.axes().begin())];
  };
  for (const MeshAxis& axis : mesh.axes()) {
    const auto divided = placement_in(division->mesh, division->placements, axis);
    placements.push_back(divided ? *divided : *placement_in(record.mesh, record.placements, axis));
  }
  record.sizes = division->sizes;
  record.mesh = mesh;
  record.placements = std::move(placements);
  return record;
}

DeviceMesh mesh_of_wrapper(const ProcessGroup& group, const std::string& axis,
                           std::span<const NamedTensor> parameters) {
  std::optional<DeviceMesh> mesh;
  std::vector<std::shared_ptr<const ParameterDivision>> divisions;
  for (const NamedTensor& parameter : parameters) {
    divisions.push_back(division_of(parameter));
    if (divisions.back() && !mesh) mesh = mesh::axis_of(divisions.back()->mesh, group);
  }
  if (!mesh) mesh = DeviceMesh(group, {{axis, group.world_size()}});
  for (const auto& division : divisions) {
    if (division) static_cast<void>(mesh->joined_with(division->mesh));
  }
  return *mesh;
}

}  // namespace cadre::shard
