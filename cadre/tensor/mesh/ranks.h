// The ranks over which a wrapper, a layer or a data loader works: those of a group, or those along
// axes of a mesh. Functions and classes that need ranks take this value, and a ProcessGroup or a
// DeviceMesh is converted to it:
//
//   cadre::DistributedDataParallel model{net, world};            // all ranks
//   cadre::DistributedDataParallel model{net, mesh["dp"]};       // those along one axis
//
// Threads: as ProcessGroup. Blocking: group() and mesh_with_axis(), which may create a group, until
// all members of it have called them. Lifetime: a cheap value; keeps the group or the mesh. Errors:
// kInvalidArgument on each rank for a mesh with several axes where the call takes one; errors of
// the groups.
#pragma once

#include <optional>
#include <string_view>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/mesh/device_mesh.h"

namespace cadre {

class CADRE_EXPORT Ranks {
 public:
  Ranks(const ProcessGroup& group) : group_(group) {}  // NOLINT: implicit by design
  Ranks(const DeviceMesh& mesh) : mesh_(mesh) {}       // NOLINT: implicit by design

  int size() const;
  // Returns the group of all these ranks. If they lie along several axes, the order is row-major.
  const ProcessGroup& group() const;
  // Returns the group along the only axis; throws if there are several axes. call: the name of the
  // program's call in the error; example: the name of an axis in the error.
  const ProcessGroup& group_of_one_axis(std::string_view call, std::string_view example) const;
  // Returns the mesh from which these ranks were made; nullopt if they were made from a group.
  const std::optional<DeviceMesh>& mesh() const { return mesh_; }
  // Returns the mesh. If the ranks were made from a group, returns a new mesh with one axis of this
  // name, which is a collective of the group.
  DeviceMesh mesh_with_axis(std::string_view name) const;

 private:
  std::optional<ProcessGroup> group_;  // if nullopt, the ranks are those of mesh_
  std::optional<DeviceMesh> mesh_;
};

}  // namespace cadre
