#include "cadre/tensor/mesh/device_mesh.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/checks.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/operands/operands.h"
#include "cadre/tensor/mesh/mesh_groups.h"
#include "cadre/tensor/mesh/whole_axes.h"

namespace cadre {
namespace {

// Returns the name for a list such as "{dp: 2, tp: 4}", quoted if it has characters other than
// letters, digits and a few marks.
std::string text_of(const std::string& name) {
  const auto is_plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("_-+./").find(c) != std::string_view::npos;
  };
  if (std::ranges::all_of(name, is_plain)) return name;
  std::string text = "\"";
  for (const char c : name) {
    if (c == '"' || c == '\\') text += '\\';
    text += c;
  }
  return text + "\"";
}

// Returns a text such as "{dp: 2, tp: 4}". Different lists of axes have different texts.
std::string text_of(const std::vector<MeshAxis>& axes) {
  std::string text;
  for (const MeshAxis& axis : axes) {
    text += format("{}{}: {}", text.empty() ? "" : ", ", text_of(axis.name), axis.size);
  }
  return "{" + text + "}";
}

[[noreturn]] void refuse_axes(const ProcessGroup& world, const std::vector<MeshAxis>& axes,
                              const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument,
              format("DeviceMesh {} on group \"{}\", rank {}: {}", text_of(axes), world.name(),
                     world.rank(), problem));
}

void check_axes(const ProcessGroup& world, const std::vector<MeshAxis>& axes) {
  if (axes.empty()) {
    refuse_axes(world, axes, "it has no axis; name at least one, as {{\"dp\", world_size}}");
  }
  std::set<std::string_view> names;
  int64_t product = 1;
  for (const MeshAxis& axis : axes) {
    if (axis.name.empty()) refuse_axes(world, axes, "an axis has no name; give each one");
    if (!names.insert(axis.name).second) {
      refuse_axes(world, axes,
                  format("the name \"{}\" appears twice; give each axis its own", axis.name));
    }
    if (axis.size < 1) {
      refuse_axes(world, axes,
                  format("the size of axis \"{}\" is {}; choose at least 1", axis.name, axis.size));
    }
    // The product is capped at 2^31, which is more than any world size, so that it cannot overflow.
    product = std::min<int64_t>(product * axis.size, int64_t{1} << 31);
  }
  if (product != world.world_size()) {
    refuse_axes(world, axes,
                format("the product of the sizes is {}, but the group has {} ranks; choose sizes "
                       "whose product is that",
                       product, world.world_size()));
  }
}

// Returns a number that is unique to the mesh and equal on all ranks: the number of the collective
// in which the ranks compare their axes.
uint64_t number_of_mesh(const ProcessGroup& world, const std::vector<MeshAxis>& axes) {
  Communicator& communicator = world.communicator();
  const uint64_t number = communicator.num_collectives() + 1;
  if (world.world_size() == 1) {
    // The comparison below runs no collective in a world of one. This all_gather increments the
    // number of collectives instead, so that the next mesh gets another number.
    std::byte none{};
    communicator.all_gather(std::span(&none, 1), std::span(&none, 1), DType::kUint8,
                            {.call = "DeviceMesh"});
    return number;
  }
  check_equal_on_all_ranks(
      world, "DeviceMesh",
      [&]() -> std::vector<AgreedField> {
        return {{"the mesh", text_of(axes)}};
      },
      "let all ranks make the same meshes in the same order");
  return number;
}

std::shared_ptr<MeshGroups> groups_for(const ProcessGroup& world,
                                       const std::vector<MeshAxis>& axes) {
  // All ranks compare the axes first, so that they check the same axes and throw the same error.
  const uint64_t number = number_of_mesh(world, axes);
  check_axes(world, axes);
  // The id contains the name of the world's group, because meshes over different groups may have
  // the same number.
  const std::string& name = world.communicator().membership().group;
  return std::make_shared<MeshGroups>(world, format("{}/{}", name, number));
}

int size_of_steps(const auto& steps) {
  int size = 1;
  for (const auto& step : steps) size *= step.size;
  return size;
}

}  // namespace

struct DeviceMesh::View {
  std::vector<MeshAxis> axes;
  std::vector<std::vector<Step>> steps;  // one list for each axis
  std::vector<int> shape;
  std::vector<int> coordinates;
};

DeviceMesh::DeviceMesh(const ProcessGroup& world, std::vector<MeshAxis> axes)
    : groups_(groups_for(world, axes)) {
  std::vector<std::vector<Step>> steps(axes.size());
  int stride = 1;
  for (size_t i = axes.size(); i-- > 0;) {
    steps[i] = {{axes[i].size, stride, i}};
    stride *= axes[i].size;
  }
  *this = DeviceMesh(std::move(groups_), std::move(axes), std::move(steps));
}

DeviceMesh::DeviceMesh(std::shared_ptr<MeshGroups> groups, std::vector<MeshAxis> axes,
                       std::vector<std::vector<Step>> steps, std::shared_ptr<const View> whole)
    : groups_(std::move(groups)) {
  const auto view = std::make_shared<View>(View{std::move(axes), std::move(steps), {}, {}});
  for (const std::vector<Step>& axis : view->steps) {
    int coordinate = 0;
    for (const Step& step : axis) {
      coordinate = coordinate * step.size + groups_->world().rank() / step.stride % step.size;
    }
    view->coordinates.push_back(coordinate);
    view->shape.push_back(size_of_steps(axis));
  }
  view_ = view;
  whole_ = whole ? std::move(whole) : view_;
}

const std::vector<MeshAxis>& DeviceMesh::axes() const {
  return view_->axes;
}

const std::vector<int>& DeviceMesh::shape() const {
  return view_->shape;
}

int DeviceMesh::size() const {
  int size = 1;
  for (const int axis : view_->shape) size *= axis;
  return size;
}

int DeviceMesh::size(std::string_view axis) const {
  return view_->shape[index_of(axis)];
}

const std::vector<int>& DeviceMesh::coordinates() const {
  return view_->coordinates;
}

int DeviceMesh::coordinate(std::string_view axis) const {
  return view_->coordinates[index_of(axis)];
}

const ProcessGroup& DeviceMesh::group(std::string_view axis) const {
  const size_t index = index_of(axis);
  return group_along(std::span(&index, 1));
}

const ProcessGroup& DeviceMesh::joint_group(const std::vector<std::string>& axes) const {
  return group_along(indices_of(axes));
}

const ProcessGroup& DeviceMesh::joint_group() const {
  std::vector<size_t> indices(view_->axes.size());
  std::iota(indices.begin(), indices.end(), size_t{0});
  return group_along(indices);
}

const ProcessGroup& DeviceMesh::group_along(std::span<const size_t> axes) const {
  std::string name;
  for (const size_t index : axes) name += (name.empty() ? "" : "+") + view_->axes[index].name;
  return groups_->group(ranks_along(axes), name);
}

std::vector<int> DeviceMesh::ranks(std::string_view axis) const {
  const size_t index = index_of(axis);
  std::vector<int> ranks = ranks_along(std::span(&index, 1));
  for (int& rank : ranks) rank = groups_->world().global_rank(rank);
  return ranks;
}

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& names) const {
  std::vector<MeshAxis> axes;
  std::vector<std::vector<Step>> steps;
  for (const size_t index : indices_of(names)) {
    if (view_->axes[index].name != names[axes.size()]) {
      refuse(
          format("slice: axis \"{}\" stands before \"{}\" in the mesh; name the axes in the order "
                 "of the mesh",
                 view_->axes[index].name, names[axes.size()]));
    }
    axes.push_back(view_->axes[index]);
    steps.push_back(view_->steps[index]);
  }
  return DeviceMesh(groups_, std::move(axes), std::move(steps), whole_);
}

DeviceMesh DeviceMesh::flatten(const std::vector<std::string>& names, std::string name) const {
  const std::vector<size_t> indices = indices_of(names);
  if (name.empty()) refuse("flatten: the new axis has no name; give it one");
  std::vector<MeshAxis> axes;
  std::vector<std::vector<Step>> steps;
  for (size_t index = 0; index < view_->axes.size(); ++index) {
    const MeshAxis& axis = view_->axes[index];
    const bool is_flattened = std::ranges::find(indices, index) != indices.end();
    if (!is_flattened && axis.name == name) {
      refuse(format("flatten: the mesh has an axis \"{}\" already; choose another name", name));
    }
    if (!is_flattened) {
      axes.push_back(axis);
      steps.push_back(view_->steps[index]);
    } else if (index == indices.front()) {
      axes.push_back({name, 1});
      steps.emplace_back();
    }
  }
  std::vector<Step>& merged = steps[indices.front()];
  for (const size_t index : indices) {
    merged.insert(merged.end(), view_->steps[index].begin(), view_->steps[index].end());
  }
  axes[indices.front()].size = size_of_steps(merged);
  return DeviceMesh(groups_, std::move(axes), std::move(steps), whole_);
}

DeviceMesh DeviceMesh::joined_with(const DeviceMesh& other) const {
  if (groups_ != other.groups_) {
    refuse(
        format("joined_with {}: the two come from different meshes; slice both from one mesh of "
               "all ranks",
               other.to_string()));
  }
  struct Part {
    MeshAxis axis;
    std::vector<Step> steps;
  };
  std::vector<Part> parts;
  for (const View* const view : {view_.get(), other.view_.get()}) {
    for (size_t i = 0; i < view->axes.size(); ++i) {
      const Part part{view->axes[i], view->steps[i]};
      const auto overlaps = [&](const Part& known) {
        return std::ranges::any_of(known.steps, [&](const Step& step) {
          return std::ranges::count(part.steps, step.axis, &Step::axis) > 0;
        });
      };
      const auto known = std::ranges::find_if(parts, overlaps);
      const bool has_name = std::ranges::any_of(
          parts, [&](const Part& other_part) { return other_part.axis.name == part.axis.name; });
      if (known == parts.end() && has_name) {
        refuse(format(
            "joined_with {}: both have an axis \"{}\", along which different ranks lie; give "
            "flattened axes names that no other axis has",
            other.to_string(), part.axis.name));
      }
      if (known == parts.end()) {
        parts.push_back(part);
      } else if (known->axis != part.axis || known->steps != part.steps) {
        refuse(
            format("joined_with {}: axis \"{}\" overlaps axis \"{}\"; use axes of the mesh, or the "
                   "same flattened axis in both",
                   other.to_string(), part.axis.name, known->axis.name));
      }
    }
  }
  std::ranges::sort(parts, {}, [](const Part& part) { return part.steps.front().axis; });
  std::vector<MeshAxis> axes;
  std::vector<std::vector<Step>> steps;
  for (Part& part : parts) {
    axes.push_back(std::move(part.axis));
    steps.push_back(std::move(part.steps));
  }
  return DeviceMesh(groups_, std::move(axes), std::move(steps), whole_);
}

std::vector<std::string> mesh::whole_axes_of(const DeviceMesh& mesh, std::string_view axis) {
  std::vector<std::string> names;
  for (const DeviceMesh::Step& step : mesh.view_->steps[mesh.index_of(axis)]) {
    names.push_back(mesh.whole_->axes[step.axis].name);
  }
  return names;
}

DeviceMesh mesh::axis_over(const DeviceMesh& mesh, const std::vector<std::string>& whole_axes,
                           std::string name) {
  const DeviceMesh all = mesh.whole();
  std::vector<DeviceMesh::Step> steps;
  for (const std::string& axis : whole_axes) {
    const std::vector<DeviceMesh::Step>& given = all.whole_->steps[all.index_of(axis)];
    steps.insert(steps.end(), given.begin(), given.end());
  }
  std::vector<MeshAxis> axes{{std::move(name), size_of_steps(steps)}};
  return DeviceMesh(mesh.groups_, std::move(axes), {std::move(steps)}, mesh.whole_);
}

std::optional<DeviceMesh> mesh::axis_of(const DeviceMesh& mesh, const ProcessGroup& group) {
  const DeviceMesh all = mesh.whole();
  const std::vector<int> members = group.global_ranks();
  for (const MeshAxis& axis : all.axes()) {
    if (all.ranks(axis.name) == members) return all[axis.name];
  }
  return std::nullopt;
}

DeviceMesh DeviceMesh::whole() const {
  return DeviceMesh(groups_, whole_->axes, whole_->steps, whole_);
}

void DeviceMesh::close(Duration timeout) const {
  groups_->close(deadline_of(groups_->world().communicator(), "DeviceMesh::close", timeout));
}

std::string DeviceMesh::to_string() const {
  return text_of(view_->axes);
}

size_t DeviceMesh::index_of(std::string_view axis) const {
  for (size_t i = 0; i < view_->axes.size(); ++i) {
    if (view_->axes[i].name == axis) return i;
  }
  refuse(format("it has no axis \"{}\"; use one of its names", axis));
}

std::vector<size_t> DeviceMesh::indices_of(std::span<const std::string> axes) const {
  if (axes.empty()) refuse("no axis is named; name at least one");
  std::set<size_t> indices;
  for (const std::string& axis : axes) {
    if (!indices.insert(index_of(axis)).second) {
      refuse(format("axis \"{}\" is named twice; name each once", axis));
    }
  }
  return {indices.begin(), indices.end()};
}

std::vector<int> DeviceMesh::ranks_along(std::span<const size_t> axes) const {
  std::vector<int> ranks = {groups_->world().rank()};
  for (const size_t axis : axes) {
    for (const Step& step : view_->steps[axis]) {
      std::vector<int> longer;
      for (const int rank : ranks) {
        const int first = rank - rank / step.stride % step.size * step.stride;
        for (int i = 0; i < step.size; ++i) longer.push_back(first + i * step.stride);
      }
      ranks = std::move(longer);
    }
  }
  return ranks;
}

void DeviceMesh::refuse(const std::string& problem) const {
  refuse_axes(groups_->world(), view_->axes, problem);
}

}  // namespace cadre
