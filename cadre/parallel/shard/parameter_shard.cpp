#include "cadre/parallel/shard/parameter_shard.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/tensor/hooks/shard_mark.h"

namespace cadre {
namespace {

// Cuts a range of a box into boxes. The rows of a dim that the range covers completely are one box.
// The first and the last row, of which it may cover a part, are cut in the same way along the next
// dims.
class Cutter {
 public:
  explicit Cutter(const Box& box) : box_(box), row_numels_(box.sizes.size()) {
    int64_t numel = 1;
    for (size_t dim = box.sizes.size(); dim-- > 0;) {
      row_numels_[dim] = numel;
      numel *= box.sizes[dim];
    }
  }

  // The range counts the elements of `row`, which is the whole box or has size 1 in all dims before
  // `dim`.
  void cut(Box row, size_t dim, FlatRange range) {
    if (range.size() == 0) return;
    if (dim == box_.sizes.size()) {
      boxes.push_back(std::move(row));
      return;
    }
    const int64_t numel = row_numels_[dim];
    int64_t first = range.begin / numel;
    if (range.begin % numel != 0) {
      const int64_t end = std::min(range.end - first * numel, numel);
      cut(rows(row, dim, {first, first + 1}), dim + 1, {range.begin % numel, end});
      ++first;
    }
    const int64_t last = range.end / numel;
    if (first > last) return;
    if (first < last) boxes.push_back(rows(row, dim, {first, last}));
    cut(rows(row, dim, {last, last + 1}), dim + 1, {0, range.end % numel});
  }

  std::vector<Box> boxes;

 private:
  static Box rows(Box box, size_t dim, FlatRange range) {
    box.offsets[dim] += range.begin;
    box.sizes[dim] = range.size();
    return box;
  }

  const Box& box_;
  std::vector<int64_t> row_numels_;  // elements of one row, by dim
};

}  // namespace

Box local_box_of(const ParameterShard& shard) {
  return local_box(shard.sizes, shard.mesh.shape(), shard.mesh.coordinates(), shard.placements);
}

std::vector<Box> boxes_of(const ParameterShard& shard) {
  return boxes_of_range(local_box_of(shard), shard.range);
}

std::vector<Box> boxes_of_range(const Box& box, const FlatRange& range) {
  if (range.begin < 0 || range.end < range.begin || range.end > box.numel()) {
    throw Error(ErrorCode::kInvalidArgument,
                format("boxes_of_range: elements [{}, {}) are no range of a box of {} elements",
                       range.begin, range.end, box.numel()));
  }
  Cutter cutter(box);
  cutter.cut(box, 0, range);
  return std::move(cutter.boxes);
}

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

std::vector<ParameterShard> FlatParameters::parameter_shards(const DeviceMesh& mesh,
                                                             const std::string& flat_axis) const {
  // Null if this object is not owned by a shared_ptr.
  const auto self = std::const_pointer_cast<FlatParameters>(weak_from_this().lock());
  std::vector<ParameterShard> shards;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    shards.push_back(on_joint_mesh({.name = parameters_[i].name,
                                    .sizes = parameters_[i].tensor.sizes().vec(),
                                    .mesh = mesh,
                                    .placements = {mesh.axes().size(), Replicate()},
                                    .flat_axis = flat_axis,
                                    .range = layout().range(i, group_.rank()),
                                    .values = values_[i],
                                    .parameter = parameters_[i].tensor,
                                    .fence = options_.keep_full ? nullptr : options_.fence,
                                    .flat = self},
                                   divisions_[i].get()));
  }
  return shards;
}

DeviceMesh mesh_of_wrapper(const ProcessGroup& group, const std::string& axis,
                           std::span<const NamedTensor> parameters) {
  std::optional<DeviceMesh> mesh;
  std::vector<std::shared_ptr<const ParameterDivision>> divisions;
  for (const NamedTensor& parameter : parameters) {
    divisions.push_back(division_of(parameter));
    if (divisions.back() && !mesh) mesh = divisions.back()->mesh.axis_of(group);
  }
  if (!mesh) mesh = DeviceMesh(group, {{axis, group.world_size()}});
  for (const auto& division : divisions) {
    if (division) static_cast<void>(mesh->joined_with(division->mesh));
  }
  return *mesh;
}

// The values may have been written without a change of autograd's version counters.
void gather_changed(std::span<const std::shared_ptr<FlatParameters>> changed) {
  for (const auto& flat : changed) {
    if (!flat->is_mapped()) flat->shard_.unsafeGetTensorImpl()->bump_version();
    flat->mark_stale();
    if (flat->options_.keep_full) flat->unshard_async();
  }
  for (const auto& flat : changed) {
    if (flat->options_.keep_full) flat->wait_unsharded();
  }
}

}  // namespace cadre
