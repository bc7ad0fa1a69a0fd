// The ranks over which a wrapper, a layer or a data loader works: those of a group, or those along
// axes of a mesh. Whatever asks "which ranks?" takes this value, and a ProcessGroup or a DeviceMesh
// is converted to it:
//
//   cadre::DistributedDataParallel model{net, world};            // all ranks
//   cadre::DistributedDataParallel model{net, mesh["dp"]};       // those along one axis
//
// Threads: as ProcessGroup. Blocking: group() and mesh_with_axis(), which may create a group, until
// all members of it have called them. Lifetime: a cheap value; keeps the group or the mesh. Errors:
// kInvalidArgument on each rank for a mesh with more axes than the call takes; those of the groups.
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
  // Of all these ranks, row-major along several axes.
  const ProcessGroup& group() const;
  // The group along the only axis; refuses several axes. call: what the program called; example:
  // the name of an axis in the error.
  const ProcessGroup& group_of_one_axis(std::string_view call, std::string_view example) const;
  // What these were made from; nullopt for a group.
  const std::optional<DeviceMesh>& mesh() const { return mesh_; }
  // The mesh; of a group a new one with one axis of this name, which is a collective of the group.
  DeviceMesh mesh_with_axis(std::string_view name) const;

 private:
  std::optional<ProcessGroup> group_;  // nullopt: see mesh_
  std::optional<DeviceMesh> mesh_;
};

}  // namespace cadre
