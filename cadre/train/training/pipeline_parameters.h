// The parameters of a pipeline as one list for an optimizer and for snapshots. The list has the
// parameters of all stages, the same on all ranks; those of stages on other ranks have no elements
// here. So the optimizer of every rank counts the steps of all parameters, and snapshots equal
// those of other layouts.
//
// Threads: one. Blocking: prepare_step(). Lifetime: shares the tensors of the pipeline and keeps
// the group. Errors: those of the group.
#pragma once

#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre::training_parts {

class CADRE_EXPORT PipelineParameters {
 public:
  // world: the ranks of all stages and of all their copies.
  PipelineParameters(const Pipeline& pipeline, const ProcessGroup& world);

  // Returns each parameter once, also if two stages of this rank share it.
  const std::vector<ParameterShard>& records() const { return records_; }
  // Call before a step of the optimizer: gives the parameters without elements a gradient, if a
  // rank that has elements has one. Collective.
  void prepare_step() const;
  // Call after a step, and after values were loaded: writes the values of shared parameters into
  // their copies on this rank, and clears the gradients of the copies.
  void fill_copies() const;
  void zero_grad() const;

 private:
  ProcessGroup world_;
  std::vector<ParameterShard> records_;
  // A parameter of records_, and the tensor of another stage of this rank that is tied to it.
  std::vector<std::pair<ParameterShard, ParameterShard>> copies_;
};

}  // namespace cadre::training_parts
