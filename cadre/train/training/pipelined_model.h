// The module of a Training whose layers are on different ranks: a torch::nn::Sequential that
// pipeline_of() divides into stages.
//
// Threads: one. Blocking: every method is collective along the axes of the pipeline and of the
// strategy, except records() and zero_grad(). Lifetime: keeps the module, whose parameters on other
// ranks have lost their memory, and the groups. Errors: kInvalidArgument on all ranks for a module
// that is no Sequential and for options that a pipeline does not follow; those of Pipeline.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/train/checkpoint/snapshot_parts.h"
#include "cadre/train/training/divided_model.h"
#include "cadre/train/training/pipeline_parameters.h"
#include "cadre/train/training/training_division.h"
#include "cadre/train/training/training_options.h"

namespace torch::nn {
class Module;
class SequentialImpl;
}  // namespace torch::nn

namespace cadre::training_parts {

class CADRE_EXPORT PipelinedModel {
 public:
  PipelinedModel(const std::shared_ptr<torch::nn::Module>& module, const TrainingDivision& division,
                 const TrainingOptions& options);

  const std::vector<ParameterShard>& records() const { return parameters_.records(); }
  const PipelineParameters& parameters() const { return parameters_; }

  // Computes the gradients of the mean over the rows of all ranks. Returns the mean loss of this
  // rank's rows, also on the ranks that do not compute it.
  at::Tensor backward(const at::Tensor& inputs, const at::Tensor& targets,
                      const PipelineLoss& loss);
  // Returns the mean loss of this rank's rows, without gradients.
  at::Tensor evaluate(const at::Tensor& inputs, const at::Tensor& targets,
                      const PipelineLoss& loss);

  // Returns this rank's tensors of the model. Gives all ranks of the pipeline the buffers of each
  // stage.
  SnapshotParts parts() const;

 private:
  void release_other_stages() const;
  void share_buffers() const;

  std::shared_ptr<torch::nn::SequentialImpl> module_;
  ProcessGroup stages_;  // the ranks with different stages
  ProcessGroup copies_;  // the ranks with the same stages and different rows
  bool shares_buffers_;  // whether all copies get the buffers of the first one
  Pipeline pipeline_;
  std::vector<int> ranks_;  // the rank, in stages_, of each layer
  std::vector<std::shared_ptr<torch::nn::Module>> own_layers_;
  PipelineParameters parameters_;
};

}  // namespace cadre::training_parts
