// Describes which elements of a parameter of a wrapped model this rank owns, and provides the scope
// in which a program writes them. Norms, optimizers and snapshots work with ParameterShards and
// need no other information about a wrapper.
//
// Threads: as the wrapper. Blocking: the constructor and finish() of a ShardUpdate are collectives
// and wait until the group's deadline. Lifetime: shares the tensors and the mesh. Errors: those of
// the group; kInvalidArgument for a ShardUpdate inside of another one; kCorruption after a rank was
// lost while it wrote shards that other ranks map.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/flat_layout.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/placement.h"

namespace cadre {

namespace shard {
class FencedUpdate;
class FlatParameters;
struct WrapperAccess;
}  // namespace shard

// Identifies the FlatParameters of a wrapper in which `values` of a ParameterShard lie. Programs
// only test whether there is one.
class ShardMemory {
 public:
  ShardMemory() = default;
  // Returns whether `values` lie in FlatParameters.
  explicit operator bool() const { return flat_ != nullptr; }

 private:
  friend class shard::FlatParameters;
  explicit ShardMemory(std::shared_ptr<shard::FlatParameters> flat) : flat_(std::move(flat)) {}

  std::shared_ptr<shard::FlatParameters> flat_;  // the wrapper shares it
};

// Describes the elements of one parameter that this rank has. Snapshots contain a SnapshotTensor
// (train/checkpoint/snapshot_parts.h) instead, which only lists the boxes of a tensor that a rank
// has.
struct ParameterShard {
  std::string name;            // the name in the plain module
  std::vector<int64_t> sizes;  // the sizes of the whole parameter
  DeviceMesh mesh;
  // One placement for each axis of the mesh; Replicate() on the flat axis.
  std::vector<Placement> placements;
  // The local box is the part of the parameter that the placements give this rank. The ranks along
  // the flat axis divide the elements of that box, in row-major order, into consecutive ranges. If
  // nullopt, each rank has the whole local box.
  std::optional<std::string> flat_axis;
  FlatRange range;  // the elements of the local box that this rank has
  // The values of these elements, (range.size()): a leaf that an optimizer updates; its grad() is
  // the reduced gradient.
  at::Tensor values;
  // The tensor of the plain module, for options that depend on a parameter's name or number of
  // dims.
  at::Tensor parameter;
  // Where `values` lie. A program must hold a ShardUpdate while it writes `values` in
  // FlatParameters; it may write other `values` at any time.
  ShardMemory memory = {};
  // The axis along which the ranks have different stages of a pipeline. On ranks that do not have
  // the parameter's stage, `range` is empty. If nullopt, there is no pipeline.
  std::optional<std::string> stage_axis = {};
  // Whether another rank along stage_axis owns the same elements, as for a weight that two stages
  // share. A norm counts only the elements of that other rank.
  bool is_copy = false;
};

// A wrapper that describes what each rank owns by a list of ParameterShards. The list has the same
// parameters in the same order on all ranks.
template <typename Model>
concept HasParameterShards = requires(Model& model) {
  { model.parameter_shards() } -> std::convertible_to<std::vector<ParameterShard>>;
};

// A module, or a wrapper of one.
template <typename Model>
concept HasParameters = requires(Model& model) {
  { model.parameters() } -> std::convertible_to<std::vector<at::Tensor>>;
};

// A scope in which the program writes the values of a wrapper's ParameterShards. All ranks make it
// together. An exception before finish() abandons the update: mapped shards are then unusable on
// all ranks.
//
//   cadre::ShardUpdate update{model};   // a wrapper, or a list of its ParameterShards
//   ... write ParameterShard::values ...
//   update.finish();
class CADRE_EXPORT ShardUpdate {
 public:
  explicit ShardUpdate(std::span<const ParameterShard> shards);
  template <HasParameterShards Model>
  explicit ShardUpdate(Model& model) : ShardUpdate(model.parameter_shards()) {}
  ~ShardUpdate();
  ShardUpdate(const ShardUpdate&) = delete;
  ShardUpdate& operator=(const ShardUpdate&) = delete;

  // Ends the update. If the wrapper keeps its parameters whole, also gathers them. Without this
  // call the destructor abandons the update.
  void finish();

 private:
  std::unique_ptr<shard::FencedUpdate> update_;
  // FlatParameters that keep their parameters whole, which finish() gathers.
  std::vector<std::shared_ptr<shard::FlatParameters>> kept_;
};

// A model that clip_grad_norm_(), GradScaler and check_gradients_finite() accept.
template <typename Model>
concept HasGradients = HasParameterShards<Model> || HasParameters<Model>;

}  // namespace cadre
