// The list of ParameterShards of all stages of a pipeline, which norms and snapshots use. The list
// is the same on all ranks; if another rank has the stage, the range of the ParameterShard is
// empty.
//
// Threads: one thread. Blocking: the constructor is a collective of the pipeline's group. Lifetime:
// shares the ownership of the parameters and of the meshes. Errors: kInvalidArgument, on all ranks,
// if the axes that divide a parameter, the axis of the pipeline and the axes of the shards do not
// all belong to one mesh of all ranks.
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
  // Whether ranks have whole stages or shards of them.
  struct Form {
    // The mesh of the ranks that own shards; nullopt if every rank has whole stages.
    std::optional<DeviceMesh> shards = {};
    // Null before the stages are sharded. The ParameterShards then describe whole stages, and the
    // constructor makes the same checks as after the sharding.
    const ShardedStages* sharded = nullptr;
  };
  // `mesh` has one axis, that of the pipeline.
  StageRecords(const ProcessGroup& group, const DeviceMesh& mesh,
               const std::vector<PipelineStage>& stages, const Form& form);

  // Returns the ParameterShards of all stages, in the order of the stages and of their parameters.
  // If a tensor has several names on a rank, it is listed once, under the first name.
  std::vector<ParameterShard> all() const;
  // Returns the tensors that this rank has, for an optimizer.
  std::vector<at::Tensor> values() const;
  // Ties these parameters: the list then has them as one parameter with the name of the first. If a
  // rank has several tensors of the tie, the others stay in the list as copies with that name.
  void tie(const std::vector<StageParameter>& parameters);
  // If these parameters cannot be tied, returns a sentence about two of them whose sizes, dtypes or
  // divisions differ, the same on all ranks; else nullopt. Names that no stage has are ignored.
  std::optional<std::string> difference(const std::vector<StageParameter>& parameters) const;

 private:
  struct Entry {
    int stage;
    // The names of the tensor in the modules of the stages on its rank.
    std::vector<StageParameter> names;
    std::string form;  // sizes, dtype and division as text; equal for tied parameters
    ParameterShard record;
    int holder;    // the rank that has the parameter
    bool is_held;  // whether this rank has it
  };

  // Returns the index of the parameter in entries_, or entries_.size() if no stage has it.
  size_t find(const StageParameter& parameter) const;

  std::vector<Entry> entries_;
};

}  // namespace cadre::parallel
