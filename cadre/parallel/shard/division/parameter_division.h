// Says how parameters are divided along the axes of meshes. A parameter may be divided twice, for
// example by tensor parallelism and then by FSDP. It stores its first division, and its
// ParameterShard then describes both.
//
// Threads: one at a time for the same parameters. Blocking: mesh_of_wrapper() may make a mesh,
// which is a collective. Lifetime: a parameter owns its division. Errors: cadre::Error.
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

// Says how a parameter was divided before its module was wrapped.
struct ParameterDivision {
  std::vector<int64_t> sizes;  // the sizes of the whole parameter
  DeviceMesh mesh;
  std::vector<Placement> placements;  // has one placement for each axis of the mesh
};

// Stores in a divided parameter how it is divided, so that the ParameterShards of later wrappers
// have the axes of both divisions. parallelize_module() and other functions that divide parameters
// call this once for each parameter. `record.parameter` must have a ShardMark already.
CADRE_EXPORT void keep_division(const ParameterShard& record);
// Returns how the parameter is divided; null if it is whole. Throws kInvalidArgument if the
// parameter is divided among ranks without a mesh, for example by a layer that was constructed with
// a group.
CADRE_EXPORT std::shared_ptr<const ParameterDivision> division_of(const NamedTensor& parameter);
// Returns `record` with the axes of its own mesh and of the mesh of `division`, and with the sizes
// of the undivided parameter. `record` comes from a wrapper that divided the parameter a second
// time and took the local part of the first division, `division`, for the whole. `division` may be
// null.
CADRE_EXPORT ParameterShard on_joint_mesh(ParameterShard record, const ParameterDivision* division);
// Returns a mesh of one axis with the ranks of `group`, the group of a wrapper. If parameters are
// divided already, this is the axis of their mesh that consists of these ranks. Otherwise it is a
// new mesh with an axis of this name; making it is a collective of the group. Throws
// kInvalidArgument if the parameters are divided along a mesh of other ranks.
CADRE_EXPORT DeviceMesh mesh_of_wrapper(const ProcessGroup& group, const std::string& axis,
                                        std::span<const NamedTensor> parameters);

// Returns the groups of those mesh axes along which a parameter of the list is divided, without
// groups of one rank. A sum over all elements of the parameters is computed by one all_reduce in
// each of these groups, one after the other.
CADRE_EXPORT std::vector<ProcessGroup> dividing_groups(std::span<const ParameterShard> shards);

}  // namespace cadre::shard
