// How parameters are divided along the axes of meshes: what a parameter keeps of the division that
// was made before a wrapper, the ParameterShards of both together, and the groups that divide the
// elements.
//
// Threads: one for the same parameters. Blocking: mesh_of_wrapper() may make a mesh, which is a
// collective. Lifetime: a parameter owns its division. Errors: cadre::Error.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/placement.h"

namespace cadre::shard {

// Says how a parameter was divided before a wrapper is made of its module.
struct ParameterDivision {
  std::vector<int64_t> sizes;  // the sizes of the whole parameter
  DeviceMesh mesh;
  std::vector<Placement> placements;  // has one placement for each axis of the mesh
};

// Stores in a divided parameter how it is divided, so that the ParameterShards of later wrappers
// have the axes of both. parallelize_module() and others that divide parameters call this for each
// of them. The parameter of `record` is marked as a shard.
CADRE_EXPORT void keep_division(const ParameterShard& record);
// Returns how the parameter is divided; null if it is whole. Throws kInvalidArgument for a
// parameter that is divided along no mesh, as by a layer that was constructed with a group.
CADRE_EXPORT std::shared_ptr<const ParameterDivision> division_of(const NamedTensor& parameter);
// Returns `record` on the axes of both meshes, with the sizes of the whole parameter. `record` is
// of a wrapper for which the parameter, as it was divided before, is the whole. `division` may be
// null.
CADRE_EXPORT ParameterShard on_joint_mesh(ParameterShard record, const ParameterDivision* division);
// Returns the ranks of a wrapper as a mesh of one axis. If parameters are divided, it is the axis
// of their mesh along which the ranks lie; else a new mesh with an axis of this name, which is a
// collective of the group. Throws kInvalidArgument if the parameters are divided along a mesh of
// other ranks.
CADRE_EXPORT DeviceMesh mesh_of_wrapper(const ProcessGroup& group, const std::string& axis,
                                        std::span<const NamedTensor> parameters);

// Returns the groups of several ranks, along the axes, that divide the elements of any parameter of
// the list. A sum over all elements adds up the ranks' values in each of these groups, one group
// after the other.
CADRE_EXPORT std::vector<ProcessGroup> dividing_groups(std::span<const ParameterShard> shards);

}  // namespace cadre::shard
