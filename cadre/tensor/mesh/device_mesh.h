// Arranges the ranks of a group as a grid with named axes, and creates the groups along its axes.
//
// Threads: as ProcessGroup. The constructor is a collective of the world. Blocking: the
// constructor; the first group() of each axis, until all members of that group have called it;
// close(). Lifetime: a cheap value over shared state; slices and flattened meshes share the groups
// of the mesh from which they were made. The groups live as long as the last of these meshes, and
// keep the world. Errors: cadre::Error, kInvalidArgument for axes whose sizes do not multiply to
// the world's size, for unknown axes and, on all ranks, for axes that differ between ranks. The
// world and the groups of a mesh fail together, on all ranks of the world. After that rejoin() the
// world and create a new mesh.
// Ranks are in row-major order: neighbouring ranks differ in the last axis. A world of one needs no
// store and no connection. Source: torch.distributed.device_mesh; docs/decisions/0012. Guide:
// docs/guide/parallel/mesh.md.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

class DeviceMesh;
class MeshGroups;

namespace mesh {  // functions of the library itself, not for programs
std::vector<std::string> whole_axes_of(const DeviceMesh& mesh, std::string_view axis);
DeviceMesh axis_over(const DeviceMesh& mesh, const std::vector<std::string>& whole_axes,
                     std::string name);
}  // namespace mesh

struct MeshAxis {
  std::string name;
  int size;
  friend bool operator==(const MeshAxis&, const MeshAxis&) = default;
};

class CADRE_EXPORT DeviceMesh {
 public:
  // axes: in row-major order, so the coordinate of the last axis varies fastest with the rank.
  // Sizes are at least 1 and multiply to the world's size; names are unique and not empty.
  DeviceMesh(const ProcessGroup& world, std::vector<MeshAxis> axes);
  // A move is a copy, so that an object that was moved from is usable.
  DeviceMesh(const DeviceMesh&) = default;
  DeviceMesh& operator=(const DeviceMesh&) = default;

  const std::vector<MeshAxis>& axes() const;
  // Returns the sizes of the axes.
  const std::vector<int>& shape() const;
  // The number of ranks.
  int size() const;
  int size(std::string_view axis) const;
  // coordinates() returns the coordinates of this rank, one for each axis; coordinate() returns
  // that along one axis, which is also this rank's rank in group(axis).
  const std::vector<int>& coordinates() const;
  int coordinate(std::string_view axis) const;

  // group() returns the group of the ranks that differ from this rank only in their coordinate
  // along `axis`; joint_group() the same for several axes (in row-major order of the mesh). The
  // group is created at its first use; the reference is valid as long as this mesh or a copy, slice
  // or flattened mesh of it exists. Along an axis of size 1 it is a group of one.
  const ProcessGroup& group(std::string_view axis) const;
  const ProcessGroup& joint_group(const std::vector<std::string>& axes) const;
  // Returns the group of all ranks of this mesh. In a slice these are the ranks that differ from
  // this rank only along the slice's axes.
  const ProcessGroup& joint_group() const;
  // Returns the global ranks (those of the group that was connected first) of the members of
  // group(axis), by coordinate. No communication.
  std::vector<int> ranks(std::string_view axis) const;

  // Returns the mesh of the ranks that differ from this rank only along these axes, which must be
  // given in the order of the mesh. No communication.
  DeviceMesh slice(const std::vector<std::string>& axes) const;
  DeviceMesh operator[](std::string_view axis) const { return slice({std::string(axis)}); }
  // Returns a mesh in which one axis of this name replaces `axes` (one or more, not necessarily
  // adjacent) at the position of the first of them. Its coordinate is their row-major index. No
  // communication.
  DeviceMesh flatten(const std::vector<std::string>& axes, std::string name) const;

  // Returns the mesh that has the axes of both, in the order of the mesh from which both were made
  // by slice() or flatten(); a common axis appears once. Throws if the two were made from different
  // meshes, if an axis of one is a part of a flattened axis of the other, or if two axes with
  // different ranks have the same name. No communication.
  DeviceMesh joined_with(const DeviceMesh& other) const;
  // Returns the mesh that the constructor made over all ranks of the world: this mesh itself, or
  // the mesh from which it was made (slice(), flatten(), ...).
  DeviceMesh whole() const;

  // Closes all groups created by this mesh and by meshes that share its groups, like
  // ProcessGroup::close(). timeout: the limit for all of them together.
  void close(Duration timeout = kDefaultCloseTimeout) const;

  // Returns "{dp: 2, tp: 4}", for messages.
  std::string to_string() const;

 private:
  // The size and stride of an axis in the ranks of the world. A flattened axis has several Steps,
  // the one with the largest stride first.
  struct Step {
    int size;
    int stride;
    size_t axis;  // the index of the axis in whole()

    bool operator==(const Step&) const = default;
  };
  struct View;

  friend std::vector<std::string> mesh::whole_axes_of(const DeviceMesh& mesh,
                                                      std::string_view axis);
  friend DeviceMesh mesh::axis_over(const DeviceMesh& mesh,
                                    const std::vector<std::string>& whole_axes, std::string name);

  DeviceMesh(std::shared_ptr<MeshGroups> groups, std::vector<MeshAxis> axes,
             std::vector<std::vector<Step>> steps, std::shared_ptr<const View> whole = nullptr);
  size_t index_of(std::string_view axis) const;
  // Returns the indices in ascending order. Throws if an axis is named twice, or for an empty list.
  std::vector<size_t> indices_of(std::span<const std::string> axes) const;
  const ProcessGroup& group_along(std::span<const size_t> axes) const;
  // Returns the ranks of the world that differ from this rank only in these axes, in row-major
  // order.
  std::vector<int> ranks_along(std::span<const size_t> axes) const;
  [[noreturn]] void refuse(const std::string& problem) const;

  std::shared_ptr<MeshGroups> groups_;  // shared with all slices and flattened meshes
  std::shared_ptr<const View> view_;    // shared, so that copies are cheap
  std::shared_ptr<const View> whole_;   // the view of the world mesh
};

}  // namespace cadre
