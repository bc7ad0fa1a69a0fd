#include "cadre/parallel/shard/parameter_shard.h"

#include <algorithm>
#include <utility>

#include "cadre/parallel/shard/division/parameter_division.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/shard_fence.h"

namespace cadre {
namespace shard {

std::vector<ParameterShard> FlatParameters::parameter_shards(const DeviceMesh& mesh,
                                                             const std::string& flat_axis) const {
  // Is null if no shared_ptr owns this object.
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
                                    .memory = ShardMemory(self)},
                                   divisions_[i].get()));
  }
  return shards;
}

// Increments the version of every shard, because the program may have written values in a way that
// autograd's version counters do not notice.
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

}  // namespace shard

namespace {

std::vector<std::shared_ptr<shard::FlatParameters>> flats_of(std::span<const ParameterShard> shards,
                                                             bool keeps_full) {
  std::vector<std::shared_ptr<shard::FlatParameters>> flats;
  for (const ParameterShard& record : shards) {
    const auto& flat = shard::FlatParameters::of(record.memory);
    if (!flat || flat->keeps_full() != keeps_full) continue;
    if (std::ranges::count(flats, flat) == 0) flats.push_back(flat);
  }
  return flats;
}

std::vector<std::shared_ptr<shard::ShardFence>> fences_of(std::span<const ParameterShard> shards) {
  std::vector<std::shared_ptr<shard::ShardFence>> fences;
  for (const auto& flat : flats_of(shards, /*keeps_full=*/false)) fences.push_back(flat->fence());
  return fences;
}

}  // namespace

ShardUpdate::ShardUpdate(std::span<const ParameterShard> shards)
    : update_(std::make_unique<shard::FencedUpdate>(fences_of(shards))),
      kept_(flats_of(shards, /*keeps_full=*/true)) {}

ShardUpdate::~ShardUpdate() = default;

void ShardUpdate::finish() {
  update_->finish();
  shard::gather_changed(kept_);
}

}  // namespace cadre
