// The ParameterShards of all stages of a pipeline, as norms and snapshots read them: the same list
// on all ranks, with an empty range where this rank holds other stages.
//
// Threads: one. Blocking: the constructor, a collective of the pipeline's group; the rest never.
// Lifetime: shares the parameters; keeps the meshes. Errors: kInvalidArgument, on all ranks, for a
// parameter whose axes cannot be joined with the pipeline's or with those of the shards.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "cadre/parallel/pp/pipeline_stage.h"
#include "cadre/parallel/pp/sharded_stages.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/mesh/device_mesh.h"

namespace cadre::parallel {

class StageRecords {
 public:
  // The way in which ranks hold the stages.
  struct Form {
    // The mesh whose ranks own shards; nullopt if every rank has whole stages.
    std::optional<DeviceMesh> shards = {};
    // Null before the stages are sharded. Then the ParameterShards describe the whole stages, and
    // the constructor makes the same checks as afterwards.
    const ShardedStages* sharded = nullptr;
  };
  // mesh: the pipeline's axis.
  StageRecords(const ProcessGroup& group, const DeviceMesh& mesh,
               const std::vector<PipelineStage>& stages, const Form& form);

  // Returns the ParameterShards of all stages, those of each stage in its order. A tensor with
  // several names on a rank is listed once, under the first of them.
  std::vector<ParameterShard> all() const;
  // Returns the tensors that this rank holds, for optimizers.
  std::vector<at::Tensor> values() const;
  // Ties these parameters, under the name of the first. If a rank has several tensors of the tied
  // parameter, the further ones stay in the list as copies, with that name.
  void tie(const std::vector<StageParameter>& parameters);
  // Returns why these parameters cannot be tied: a sentence about two whose sizes, dtypes or
  // divisions differ, the same on all ranks; nullopt if they can. Names that no stage has are
  // ignored.
  std::optional<std::string> difference(const std::vector<StageParameter>& parameters) const;

 private:
  struct Entry {
    int stage;
    // The names of the tensor in the modules of its rank's stages.
    std::vector<StageParameter> names;
    std::string form;  // a text of sizes, dtype and division, which is equal for tied parameters
    ParameterShard record;
    int holder;    // the rank that holds it
    bool is_held;  // whether this rank holds it
  };

  // Returns the index of the parameter in entries_, or entries_.size() if no stage has it.
  size_t find(const StageParameter& parameter) const;

  std::vector<Entry> entries_;
};

}  // namespace cadre::parallel
