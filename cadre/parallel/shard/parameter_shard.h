// Describes the part of one parameter of a wrapped model that a rank owns. Norms, optimizers and
// snapshots read only these records of a wrapper.
//
// Threads: plain values. Blocking: never. Lifetime: shares the tensors and the mesh.
// Errors: kInvalidArgument for a range that is not in its box.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/flat_layout.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/placement.h"

namespace cadre {

class FlatParameters;
class ShardFence;

struct ParameterShard {
  std::string name;            // name in the plain module
  std::vector<int64_t> sizes;  // sizes of the whole parameter
  DeviceMesh mesh;
  // The placements by axis of the mesh; Replicate() on the flat axis.
  std::vector<Placement> placements;
  // The axis whose ranks hold consecutive ranges of the elements of the local box, row-major;
  // nullopt: each rank holds the whole local box.
  std::optional<std::string> flat_axis;
  FlatRange range;    // this rank's range of the local box's elements
  at::Tensor values;  // (range.size()), a leaf that an optimizer updates; its grad is reduced
  // The plain module's tensor, of the full shape, for rules by name or dimension.
  at::Tensor parameter;
  // A program that writes `values` holds a ShardUpdate on this fence meanwhile. Null: the program
  // may write at any time.
  std::shared_ptr<ShardFence> fence = {};
  // The FlatParameters whose shard contains `values`, if any; see gather_changed().
  std::shared_ptr<FlatParameters> flat = {};
  // The axis of a pipeline's stages. A rank of this axis holds the range that the fields above
  // describe or, if it does not have the parameter's stage, an empty range. nullopt: all ranks hold
  // the parameter.
  std::optional<std::string> stage_axis = {};
  // Whether another rank of stage_axis holds the same elements, as for a tied weight. A norm counts
  // only the elements of that other rank.
  bool is_copy = false;
};

// The division that a parameter had before a wrapper is made of its module.
struct ParameterDivision {
  std::vector<int64_t> sizes;  // sizes of the whole parameter
  DeviceMesh mesh;
  std::vector<Placement> placements;  // by axis of the mesh
};

// Keeps in a divided parameter how it is divided, so that records of later wrappers have the axes
// of both. parallelize_module() and others that divide parameters call this for each of them. The
// parameter of the record is marked as a shard.
CADRE_EXPORT void keep_division(const ParameterShard& record);
// Returns how the parameter is divided; null if it is whole. Throws kInvalidArgument for a
// parameter that is divided along no mesh, as by a layer that was constructed with a group.
CADRE_EXPORT std::shared_ptr<const ParameterDivision> division_of(const NamedTensor& parameter);
// Returns `record` on the axes of both meshes, with the sizes of the whole parameter. record: of a
// wrapper for which the parameter, as it was divided before, is the whole. division: may be null.
CADRE_EXPORT ParameterShard on_joint_mesh(ParameterShard record, const ParameterDivision* division);
// Returns the ranks of a wrapper as a mesh of one axis. If parameters are divided already, returns
// the axis of their mesh along which the ranks lie; else makes a new mesh with an axis of this
// name, which is a collective of the group. Throws kInvalidArgument if the parameters are divided
// along a mesh of other ranks.
CADRE_EXPORT DeviceMesh mesh_of_wrapper(const ProcessGroup& group, const std::string& axis,
                                        std::span<const NamedTensor> parameters);

// Returns the part of the whole tensor that the placements give this rank; `range` counts its
// elements.
CADRE_EXPORT Box local_box_of(const ParameterShard& shard);
// Returns the boxes of the whole tensor that the range covers, in row-major order, at most 2 * dims
// - 1 (one for a tensor of 0 dims); their elements, one box after the other, are `values`.
CADRE_EXPORT std::vector<Box> boxes_of(const ParameterShard& shard);
CADRE_EXPORT std::vector<Box> boxes_of_range(const Box& box, const FlatRange& range);

// Returns the groups of several ranks, along the axes, that divide the elements of any parameter of
// the list. A sum over all elements adds up the ranks' values in each of these groups, one group
// after the other.
CADRE_EXPORT std::vector<ProcessGroup> dividing_groups(std::span<const ParameterShard> shards);

// Called when a program has changed `values` of records with these FlatParameters, on all ranks,
// between two steps. Gathers those with keep_full, whose whole parameters have old values; the
// others are gathered when they are used next. Collective.
CADRE_EXPORT void gather_changed(std::span<const std::shared_ptr<FlatParameters>> changed);

// A wrapper in which every rank owns a part of the parameters, or all of them. The list has the
// same parameters in the same order on all ranks.
template <typename Model>
concept HasParameterShards = requires(Model& model) {
  { model.parameter_shards() } -> std::convertible_to<std::vector<ParameterShard>>;
};

// A module, or a wrapper of one.
template <typename Model>
concept HasParameters = requires(Model& model) {
  { model.parameters() } -> std::convertible_to<std::vector<at::Tensor>>;
};

// The argument of clip_grad_norm_(), GradScaler and check_gradients_finite().
template <typename Model>
concept HasGradients = HasParameterShards<Model> || HasParameters<Model>;

}  // namespace cadre
