// Sharded parameters of this rank's stages. The parameters of a stage are divided among the ranks
// that have the same stage in other pipelines: each rank owns a shard of the parameters, of their
// gradients and of the optimizer's state, and gathers whole parameters while the schedule computes
// with a stage. A step reduces the gradients of a stage once.
//
// Threads: one thread. Blocking: the constructor, wait(), reshard() while a gather is in flight,
// and finish_step(), until the deadline of the groups. All ranks that have the same stages make the
// same calls in the same order. Lifetime: shares the parameters, which stay sharded after this
// object is destroyed. Errors: those of shard/flat_parameters.h and buckets/sharded_gradients.h;
// kInvalidArgument for a gradient that is not dense.
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
  // `mesh` has one axis, whose ranks own shards, or two axes, where the ranks along the first axis
  // have the same shards. `stages` are the stages of this rank, in the order in which a step
  // reduces them; they are the same on all ranks of the mesh.
  ShardedStages(const DeviceMesh& mesh, const std::vector<PipelineStage>& stages);
  // Throws if the constructor would throw for these stages. Checks on this rank only, without a
  // collective.
  static void check_shardable(const std::vector<PipelineStage>& stages);

  // Starts to gather the parameters of a stage (all_gather).
  void unshard(int stage);
  // Waits until the parameters of a stage are gathered. If unshard() was not called before, starts
  // the gather first.
  void wait(int stage);
  // Frees the gathered parameters of a stage; the shards remain.
  void reshard(int stage);
  void reshard_all();
  // Starts to gather these stages, in this order, and frees all others.
  void unshard_only(std::span<const int> stages);

  // Returns a sentence about the first parameter whose requires_grad has changed since
  // construction, because its gradients would not be reduced correctly; nullopt if there is none.
  std::optional<std::string> changed_parameter() const;
  void begin_step();
  // Starts to reduce the stage's gradients of this step.
  void reduce(int stage);
  // Excludes a parameter from reduce(), because the gradients of tied parameters must be summed
  // over stages while they are whole. finish_reductions() sums its whole gradient over the ranks
  // instead, and finish_step() keeps this rank's shard of it.
  void keep_whole(const at::Tensor& parameter) { whole_.insert(parameter.unsafeGetTensorImpl()); }
  // Waits for the reductions, and sums the gradients of the keep_whole() parameters over the ranks.
  // If no rank has used a parameter, its gradient stays as it was before the step.
  void finish_reductions();
  // Ends the step: keeps this rank's shards of the gradients of the keep_whole() parameters.
  void finish_step();

  // Copies the gathered parameters of a stage into the shards. Called when the program has changed
  // the gathered parameters, in the same way on all ranks.
  void take_from_parameters(int stage);
  std::vector<ParameterShard> parameter_shards(int stage) const;

 private:
  struct Place {
    size_t index;  // the index among the trained parameters
    std::shared_ptr<shard::FlatParameters> flat;
    size_t place;  // the index in the flat parameters
  };
  struct Stage {
    std::vector<std::shared_ptr<shard::FlatParameters>> flats;  // one entry for each dtype
    std::vector<Place> trained;
    std::vector<Place> frozen;  // Place::index is not used
    size_t num_buckets = 0;
  };

  void add_stage(const PipelineStage& stage, const std::shared_ptr<shard::FlatBufferPool>& pool,
                 std::vector<NamedTensor>& trained);
  bool is_whole(const Place& place) const;
  // Returns one number for each trained parameter: 1 if this rank has used it in the step, else 0.
  // After the sum over the ranks it is the number of ranks that have used the parameter.
  float* num_uses() const;

  DeviceMesh mesh_;
  std::string axis_;  // the axis of the shards
  wrap::LocatedGroup all_;
  wrap::LocatedGroup shard_;
  std::map<int, Stage> stages_;
  std::set<const void*> whole_;
  std::unique_ptr<ShardedGradients> gradients_;  // null if no parameter is trained
};

// Keeps the parameters of these stages gathered as long as this object exists. `sharded` may be
// null; then it does nothing.
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
