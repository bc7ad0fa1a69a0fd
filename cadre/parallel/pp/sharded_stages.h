// The stages of this rank whose parameters are divided among the ranks that hold the same stages:
// each rank owns a shard of them, of their gradients and of the optimizer's state, and has whole
// parameters while the schedule computes with a stage. A step reduces the gradients of a stage
// once.
//
// Threads: one. Blocking: the constructor, wait(), reshard() while a gather runs, finish_step(),
// until the deadline of the groups. All ranks that hold the same stages make the same calls in the
// same order. Lifetime: shares the parameters, which stay sharded when this is gone. Errors: those
// of shard/flat_parameters.h and buckets/sharded_gradients.h; kInvalidArgument for a gradient that
// is not dense.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "cadre/parallel/buckets/sharded_gradients.h"
#include "cadre/parallel/pp/pipeline_stage.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/mesh/device_mesh.h"

namespace cadre::parallel {

class ShardedStages {
 public:
  // mesh: one axis, whose ranks own shards; or two axes, where the ranks along the first one hold
  // the same shards. stages: the stages of this rank, in the order in which a step reduces them;
  // equal on all ranks.
  ShardedStages(const DeviceMesh& mesh, const std::vector<PipelineStage>& stages);
  // Throws, on this rank only and without a collective, for stages for which the constructor would
  // throw.
  static void check_shardable(const std::vector<PipelineStage>& stages);

  // Starts to gather the parameters of a stage.
  void unshard(int stage);
  // Waits until the parameters are whole; gathers them if unshard() has not begun to.
  void wait(int stage);
  // Frees the whole parameters; the shards remain.
  void reshard(int stage);
  void reshard_all();
  // Starts to gather these stages, in this order, and frees the others.
  void unshard_only(std::span<const int> stages);

  // Returns a sentence about the first parameter that required grad at the construction and does
  // not now, or the reverse, so that its gradients would not reach the shards; nullopt if there is
  // none.
  std::optional<std::string> changed_parameter() const;
  void begin_step();
  // Starts to reduce the gradients that the step has added to the stage.
  void reduce(int stage);
  // reduce() leaves out the gradient of this parameter. finish_reductions() sums the whole gradient
  // instead, for the sum over tied stages, and finish_step() cuts it into shards.
  void keep_whole(const at::Tensor& parameter) { whole_.insert(parameter.unsafeGetTensorImpl()); }
  // Waits for the reductions, and sums the gradients of the parameters of keep_whole() over the
  // ranks. The gradient of a parameter that no rank has used stays as it was before the step.
  void finish_reductions();
  // Ends the step: cuts the gradients of the parameters of keep_whole().
  void finish_step();

  // Called when the program has changed the whole parameters of a stage, in the same way on all
  // ranks.
  void take_from_parameters(int stage);
  std::vector<ParameterShard> parameter_shards(int stage) const;

 private:
  struct Place {
    size_t index;  // the index among the trained parameters
    std::shared_ptr<shard::FlatParameters> flat;
    size_t place;  // the index in the flat parameters
  };
  struct Stage {
    std::vector<std::shared_ptr<shard::FlatParameters>> flats;  // has one entry for each dtype
    std::vector<Place> trained;
    std::vector<Place> frozen;  // their index is not used
    size_t num_buckets = 0;
  };

  void add_stage(const PipelineStage& stage, const std::shared_ptr<shard::FlatBufferPool>& pool,
                 std::vector<NamedTensor>& trained);
  bool is_whole(const Place& place) const;
  // Returns one number for each trained parameter: 1 if this rank has used it in the step; after
  // the sum over the ranks, the number of ranks that have.
  float* num_uses() const;

  DeviceMesh mesh_;
  std::string axis_;  // the axis of the shards
  wrap::LocatedGroup all_;
  wrap::LocatedGroup shard_;
  std::map<int, Stage> stages_;
  std::set<const void*> whole_;
  std::unique_ptr<ShardedGradients> gradients_;  // is null if no parameter is trained
};

// Keeps the parameters of these stages whole as long as this object exists.
class WholeStages {
 public:
  WholeStages(ShardedStages* sharded, const std::set<int>& stages)
      : sharded_(sharded), stages_(stages) {
    if (sharded_ == nullptr) return;
    for (const int stage : stages_) sharded_->wait(stage);
  }
  ~WholeStages() {
    if (sharded_ == nullptr) return;
    for (const int stage : stages_) sharded_->reshard(stage);
  }
  WholeStages(const WholeStages&) = delete;
  WholeStages& operator=(const WholeStages&) = delete;

 private:
  ShardedStages* sharded_;
  std::set<int> stages_;
};

}  // namespace cadre::parallel
