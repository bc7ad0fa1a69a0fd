#include "cadre/parallel/pp/sharded_stages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/parallel/pp/stage_runner.h"
#include "cadre/parallel/shard/flat_storage.h"
#include "cadre/parallel/shard/shardable.h"

namespace cadre::parallel {
namespace {

constexpr const char* kShardedPipeline = "Pipeline with sharded stages";

std::map<at::ScalarType, std::vector<NamedTensor>> by_dtype(std::span<const PipelineStage> stages) {
  std::map<at::ScalarType, std::vector<NamedTensor>> parameters;
  std::set<const void*> seen;
  for (const PipelineStage& stage : stages) {
    for (const NamedTensor& parameter : stage.parameters()) {
      if (!seen.insert(parameter.tensor.unsafeGetTensorImpl()).second) continue;
      parameters[parameter.tensor.scalar_type()].push_back(parameter);
    }
  }
  return parameters;
}

}  // namespace

void ShardedStages::check_shardable(const std::vector<PipelineStage>& stages) {
  for (const auto& [dtype, parameters] : by_dtype(stages)) {
    shard::check_shardable("cadre::Pipeline with shards", parameters,
                           {.shard = dtype, .compute = dtype});
  }
}

ShardedStages::ShardedStages(const DeviceMesh& mesh, const std::vector<PipelineStage>& stages)
    : mesh_(mesh),
      axis_(mesh.axes().back().name),
      all_(mesh.joint_group()),
      shard_(mesh.group(mesh.axes().back().name)) {
  const auto pool = std::make_shared<shard::FlatBufferPool>();
  std::vector<NamedTensor> trained;
  for (const PipelineStage& stage : stages) add_stage(stage, pool, trained);
  if (trained.empty()) return;
  const auto num_trained = static_cast<int64_t>(trained.size());
  std::vector<std::shared_ptr<shard::FlatParameters>> units;
  for (const PipelineStage& stage : stages) {
    const auto& flats = stages_.at(stage.stage()).flats;
    units.insert(units.end(), flats.begin(), flats.end());
  }
  std::optional<wrap::LocatedGroup> replicate;
  if (mesh.axes().size() > 1) replicate = wrap::LocatedGroup(mesh.group(mesh.axes().front().name));
  gradients_ = std::make_unique<ShardedGradients>(
      std::move(trained), units,
      ShardedGradients::Groups{.all = all_, .shard = shard_, .replicate = std::move(replicate)},
      ShardedGradients::Options{
          .trailer_numel = num_trained,
          .wrapper = kShardedPipeline,
          .remedy = "Make the optimizer from the pipeline (pipeline.parameters())"});
}

void ShardedStages::add_stage(const PipelineStage& stage,
                              const std::shared_ptr<shard::FlatBufferPool>& pool,
                              std::vector<NamedTensor>& trained) {
  Stage& added = stages_[stage.stage()];
  for (const auto& [dtype, parameters] : by_dtype({&stage, 1})) {
    const auto flat = std::make_shared<shard::FlatParameters>(
        parameters, shard_,
        shard::FlatParametersOptions{
            .name = format("of stage {} of {}", stage.stage(), kShardedPipeline),
            .remedy = "they are whole during step() and forward() of the pipeline; an optimizer is "
                      "made from the pipeline (pipeline.parameters())",
            .pool = pool});
    added.flats.push_back(flat);
    const size_t num_before = added.trained.size();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].tensor.requires_grad()) {
        added.frozen.push_back({.index = 0, .flat = flat, .place = i});
        continue;
      }
      added.trained.push_back({.index = trained.size(), .flat = flat, .place = i});
      trained.push_back(parameters[i]);
    }
    if (added.trained.size() > num_before) ++added.num_buckets;
  }
}

void ShardedStages::unshard(int stage) {
  for (const auto& flat : stages_.at(stage).flats) flat->unshard_async();
}

void ShardedStages::wait(int stage) {
  unshard(stage);
  for (const auto& flat : stages_.at(stage).flats) flat->wait_unsharded();
}

void ShardedStages::reshard(int stage) {
  for (const auto& flat : stages_.at(stage).flats) flat->reshard();
}

void ShardedStages::reshard_all() {
  for (const auto& [stage, sharded] : stages_) reshard(stage);
}

void ShardedStages::unshard_only(std::span<const int> stages) {
  for (const auto& [stage, sharded] : stages_) {
    if (std::ranges::count(stages, stage) == 0) reshard(stage);
  }
  for (const int stage : stages) unshard(stage);
}

std::optional<std::string> ShardedStages::changed_parameter() const {
  for (const auto& [stage, sharded] : stages_) {
    for (const auto* places : {&sharded.trained, &sharded.frozen}) {
      const bool is_trained = places == &sharded.trained;
      for (const Place& place : *places) {
        const NamedTensor& parameter = place.flat->parameters()[place.place];
        const at::Tensor& values = place.flat->values(place.place);
        if (parameter.tensor.requires_grad() == is_trained &&
            values.requires_grad() == is_trained) {
          continue;
        }
        return format("\"{}\" of stage {} {} when the pipeline was constructed, and {} now",
                      parameter.name, stage, is_trained ? "required grad" : "did not require grad",
                      is_trained ? "does not" : "does");
      }
    }
  }
  return std::nullopt;
}

void ShardedStages::take_from_parameters(int stage) {
  for (const auto& flat : stages_.at(stage).flats) flat->take_from_parameters();
}

bool ShardedStages::is_whole(const Place& place) const {
  return whole_.contains(place.flat->parameters()[place.place].tensor.unsafeGetTensorImpl());
}

float* ShardedStages::num_uses() const {
  return gradients_->trailer().mutable_data_ptr<float>();
}

void ShardedStages::begin_step() {
  if (gradients_) gradients_->begin_pass({.factor = 1.0, .op = ReduceOp::kSum});
}

void ShardedStages::reduce(int stage) {
  const Stage& sharded = stages_.at(stage);
  for (const Place& place : sharded.trained) {
    const NamedTensor& parameter = place.flat->parameters()[place.place];
    check_dense_gradient(parameter);
    const bool is_used = parameter.tensor.grad().defined();
    num_uses()[place.index] = is_used ? 1 : 0;
    if (is_used && !is_whole(place)) {
      gradients_->place(place.index);
    } else {
      gradients_->place_unused(place.index);
    }
  }
  for (size_t i = 0; i < sharded.num_buckets; ++i) gradients_->launch_next();
}

void ShardedStages::finish_reductions() {
  if (!gradients_) return;
  gradients_->finish_early();
  gradients_->reduce_last();
  const at::NoGradGuard no_grad;
  for (const auto& [stage, sharded] : stages_) {
    for (const Place& place : sharded.trained) {
      const bool used_by_some = num_uses()[place.index] > 0;
      if (!is_whole(place)) {
        gradients_->settle_unused(place.index, {.used_by_some = used_by_some});
        continue;
      }
      if (!used_by_some) continue;
      const at::Tensor& parameter = place.flat->parameters()[place.place].tensor;
      at::Tensor& gradient = parameter.mutable_grad();
      gradient = gradient.defined() ? gradient.contiguous()
                                    : at::zeros_like(parameter, at::MemoryFormat::Contiguous);
      all_.all_reduce(gradient, ReduceOp::kSum);
    }
  }
}

void ShardedStages::finish_step() {
  if (!gradients_) return;
  const at::NoGradGuard no_grad;
  for (const auto& [stage, sharded] : stages_) {
    for (const Place& place : sharded.trained) {
      if (!is_whole(place)) continue;
      at::Tensor& whole = place.flat->parameters()[place.place].tensor.mutable_grad();
      gradients_->settle_unused(place.index, {.used_by_some = whole.defined()});
      if (!whole.defined()) continue;
      const FlatRange range = place.flat->layout().range(place.place, shard_.rank());
      const at::Tensor own = whole.reshape({-1}).narrow(0, range.begin, range.size());
      at::Tensor leaf = place.flat->values(place.place);
      leaf.mutable_grad().add_(own);
      whole.reset();
    }
  }
  gradients_->end_pass();
}

std::vector<ParameterShard> ShardedStages::parameter_shards(int stage) const {
  std::vector<ParameterShard> shards;
  for (const auto& flat : stages_.at(stage).flats) {
    for (ParameterShard& shard : flat->parameter_shards(mesh_, axis_)) {
      shards.push_back(std::move(shard));
    }
  }
  return shards;
}

}  // namespace cadre::parallel
