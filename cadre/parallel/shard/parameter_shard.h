// What a rank owns of one parameter of a wrapped model, and the scope in which a program writes it.
// Norms, optimizers and snapshots read ParameterShards and nothing else of a wrapper.
//
// Threads: records are plain values; an update as the wrapper. Blocking: the constructor and
// finish() of an update are collective, until the group's deadline. Lifetime: shares the tensors
// and the mesh. Errors: those of the group; kInvalidArgument for an update inside of an update;
// kCorruption after a rank was lost while it wrote shards that others map.
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

// The memory of a wrapper in which the `values` of its ParameterShards lie. Only Cadre looks into
// it.
class ShardMemory {
 public:
  ShardMemory() = default;
  // Whether `values` lie in such memory.
  explicit operator bool() const { return flat_ != nullptr; }

 private:
  friend class shard::FlatParameters;
  explicit ShardMemory(std::shared_ptr<shard::FlatParameters> flat) : flat_(std::move(flat)) {}

  std::shared_ptr<shard::FlatParameters> flat_;  // the wrapper shares it
};

// Describes the part of one parameter that this rank has. A snapshot has a SnapshotTensor
// (train/checkpoint/snapshot_parts.h) instead, which says only which boxes of a tensor this rank
// holds.
struct ParameterShard {
  std::string name;            // the name in the plain module
  std::vector<int64_t> sizes;  // the sizes of the whole parameter
  DeviceMesh mesh;
  // The placements by axis of the mesh; Replicate() on the flat axis.
  std::vector<Placement> placements;
  // The axis whose ranks hold consecutive ranges of the elements of the local box, row-major. If
  // nullopt, each rank holds the whole local box.
  std::optional<std::string> flat_axis;
  FlatRange range;  // the range of the local box's elements that this rank has
  // Has the shape (range.size()), and is a leaf that an optimizer updates; its grad is reduced.
  at::Tensor values;
  // The plain module's tensor, of the full shape, for rules by name or dimension.
  at::Tensor parameter;
  // A program that writes `values` which lie in the memory of a wrapper holds a ShardUpdate
  // meanwhile; it may write other ones at any time.
  ShardMemory memory = {};
  // The axis of a pipeline's stages. A rank of it holds what the fields above say or, if it has
  // other stages than the parameter's, an empty range. If nullopt, all ranks hold the parameter.
  std::optional<std::string> stage_axis = {};
  // Another rank of stage_axis holds the same elements, as for a tied weight. A norm counts only
  // the elements of that other rank.
  bool is_copy = false;
};

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

// A scope in which the program writes the values of a wrapper's ParameterShards. An exception
// before finish() abandons it: shards that other ranks map are lost then. All ranks make it.
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

  // Ends the update, and gathers the parameters of wrappers that keep them whole. Without this call
  // the destructor abandons the update.
  void finish();

 private:
  std::unique_ptr<shard::FencedUpdate> update_;
  // Buffers whose whole parameters have old values.
  std::vector<std::shared_ptr<shard::FlatParameters>> kept_;
};

// The argument of clip_grad_norm_(), GradScaler and check_gradients_finite().
template <typename Model>
concept HasGradients = HasParameterShards<Model> || HasParameters<Model>;

}  // namespace cadre
