// The records of the parameters of all stages of a pipeline, as norms and snapshots read them: the
// same list on all ranks, with an empty range where this rank holds other stages.
//
// Threads: one. Blocking: the constructor, a collective of the pipeline's group; the rest never.
// Lifetime: shares the parameters; keeps the meshes. Errors: kInvalidArgument, on all ranks, for a
// parameter whose axes cannot be joined with the pipeline's.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cadre/group/process_group.h"
#include "cadre/mesh/device_mesh.h"
#include "cadre/parallel/pp/pipeline_stage.h"
#include "cadre/parallel/pp/sharded_stages.h"
#include "cadre/parallel/pp/tied_parameters.h"
#include "cadre/shard/parameter_shard.h"

namespace cadre::parallel {

class StageRecords {
 public:
  // mesh: the pipeline's axis; not given: one of its own, which is refused where parameters are
  // divided along another mesh. sharded: null where every rank has whole stages.
  StageRecords(const ProcessGroup& group, std::optional<DeviceMesh> mesh,
               const std::vector<PipelineStage>& stages, const ShardedStages* sharded);

  // Of all stages, those of a stage in its order; a tensor of several stages of a rank once.
  std::vector<ParameterShard> all() const;
  // What this rank holds: for optimizers.
  std::vector<at::Tensor> values() const;
  // From here on these are one parameter, with the name of the first. Where two stages of one rank
  // have different tensors of it, the later one stays in the list under its own name.
  void tie(const std::vector<StageParameter>& parameters);

 private:
  struct Entry {
    int stage;
    std::string name;  // in the stage's module
    ParameterShard record;
    bool is_held;  // by this rank
  };

  Entry* find(const StageParameter& parameter);

  std::vector<int> holders_;  // by stage
  std::vector<Entry> entries_;
};

}  // namespace cadre::parallel
