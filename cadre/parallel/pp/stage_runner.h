// Computes the actions of one stage on this rank, and keeps of each microbatch what its backward
// needs, from its forward to the backward or weight gradient that ends its use.
//
// Threads: one. Blocking: as the stage's forward(); reduce_grad(), finish_reduction() and
// check_replicas_equal() as ProcessGroup. Lifetime: keeps the stage. Errors: those of the stage and
// of autograd; kInvalidArgument for a gradient to reduce that is not dense, and for a forward that
// writes to parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/comm/queue/work.h"
#include "cadre/parallel/pp/pipeline_stage.h"
#include "cadre/parallel/pp/split_backward.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/hooks/parameter_watch.h"

namespace cadre::parallel {

// Throws kInvalidArgument for a sparse gradient, which no reduction supports.
void check_dense_gradient(const NamedTensor& parameter);

class StageRunner {
 public:
  // reduced: the parameters whose gradients reduce_grad() sums, each once. They are the parameters
  // of the stage without those that a later reduction of this rank sums.
  StageRunner(PipelineStage stage, std::vector<NamedTensor> reduced)
      : stage_(std::move(stage)), reduced_(std::move(reduced)), writes_(stage_.parameters()) {
    if (stage_.module()) list_.emplace(stage_.module());
  }

  const PipelineStage& stage() const { return stage_; }
  // Returns a sentence about the first parameter of the module that was added, removed or replaced
  // since the construction, so that the pipeline's list of parameters is no longer right; nullopt
  // if there is none.
  std::optional<std::string> changed_parameter() const {
    return list_ ? list_->change_of_list() : std::nullopt;
  }
  // Returns the name of a parameter to which the last forward() has written; nullopt if there is
  // none.
  std::optional<std::string> written_parameter() const;

  // inputs: leaves; the stage is given them in a form that it may change in place. Returns the
  // outputs. While gradients are recorded, keeps the graph of `roots_of(outputs)`, for which
  // backward() and input_grad() take gradients.
  using Roots = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& outputs)>;
  std::vector<at::Tensor> forward(int microbatch, const std::vector<at::Tensor>& inputs,
                                  const Roots& roots_of);

  // These functions turn gradients of the outputs into gradients of the inputs: see StageGraph.
  std::vector<at::Tensor> backward(int microbatch, const std::vector<at::Tensor>& gradients);
  std::vector<at::Tensor> input_grad(int microbatch, const std::vector<at::Tensor>& gradients);
  void weight_grad(int microbatch);

  // Puts the gradients of earlier steps aside, so that only those of this step are reduced.
  void set_gradients_aside();
  // Starts to sum the gradients over `replicas`. This rank adds zeros for a parameter without a
  // gradient.
  void reduce_grad(const ProcessGroup& replicas);
  // Waits for the sums. Parameters that no replica has used then have no gradient, as in one
  // process.
  void finish_reduction();
  // Called after finish_reduction(). If a forward of any replica has written to parameters since
  // the last call, throws on all replicas unless they have the same values.
  void check_replicas_equal(const ProcessGroup& replicas);
  // Adds the gradients that were set aside.
  void add_gradients_set_aside();

  int num_live_microbatches() const { return static_cast<int>(live_.size()); }
  // Drops all microbatches and pending reductions, after a failure.
  void clear();

 private:
  PipelineStage stage_;
  std::vector<NamedTensor> reduced_;
  std::optional<wrap::ParameterWatch> list_;  // watches the module's parameters
  wrap::WriteWatch writes_;
  // A forward of this rank has written to parameters since the last comparison.
  bool has_written_ = false;
  std::map<int, StageGraph> live_;  // the graphs; the key is the microbatch
  std::vector<at::Tensor> aside_;   // has one gradient for each parameter
  // A running reduction: its parameters, and the numbers of replicas that have used each of them
  // and, as the last element, of replicas that have written to parameters.
  std::vector<at::Tensor> reducing_;
  at::Tensor num_uses_;
  std::optional<Work> reduction_;
};

}  // namespace cadre::parallel
