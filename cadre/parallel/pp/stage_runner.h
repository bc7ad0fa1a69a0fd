// Runs the computations of one stage on this rank. It keeps the graph of each microbatch from the
// forward until the backward, or the weight gradient that ends a split backward.
//
// Threads: one thread. Blocking: as the stage's forward(); reduce_grad(), finish_reduction() and
// check_replicas_equal() as ProcessGroup. Lifetime: keeps the stage. Errors: those of the stage and
// of autograd; kInvalidArgument if a gradient to reduce is not dense, and if a forward has written
// different values to the parameters of replicas.
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

// Throws kInvalidArgument if the gradient is sparse, because reductions need dense gradients.
void check_dense_gradient(const NamedTensor& parameter);

class StageRunner {
 public:
  // `reduced` are the parameters whose gradients reduce_grad() sums, each once: the parameters of
  // the stage, except those that this rank reduces later together with another stage.
  StageRunner(PipelineStage stage, std::vector<NamedTensor> reduced)
      : stage_(std::move(stage)), reduced_(std::move(reduced)), writes_(stage_.parameters()) {
    if (stage_.module()) list_.emplace(stage_.module());
  }

  const PipelineStage& stage() const { return stage_; }
  // If a parameter of the module was added, removed or replaced since construction, returns a
  // clause about the first such parameter, because the pipeline's list of parameters is then wrong;
  // else nullopt.
  std::optional<std::string> changed_parameter() const {
    return list_ ? list_->change_of_list() : std::nullopt;
  }
  // Returns the name of a parameter to which the last forward() has written; nullopt if it has
  // written to none.
  std::optional<std::string> written_parameter() const;

  // Runs the forward. `inputs` are leaves; the stage gets them in a form that it may change in
  // place. Returns the outputs. If autograd records, keeps the graph of the tensors that
  // roots_of(outputs) returns; backward() and input_grad() take the gradients of these tensors.
  using Roots = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& outputs)>;
  std::vector<at::Tensor> forward(int microbatch, const std::vector<at::Tensor>& inputs,
                                  const Roots& roots_of);

  // backward() computes the gradients of the inputs and of the parameters from those of the roots
  // (the tensors that roots_of() returned). input_grad() and weight_grad() do the same in two
  // parts; see StageGraph.
  std::vector<at::Tensor> backward(int microbatch, const std::vector<at::Tensor>& gradients);
  std::vector<at::Tensor> input_grad(int microbatch, const std::vector<at::Tensor>& gradients);
  void weight_grad(int microbatch);

  // Sets the gradients of earlier steps aside, so that only the gradients of this step are reduced.
  void set_gradients_aside();
  // Starts to sum the gradients over `replicas` (all_reduce). A parameter without a gradient on
  // this rank counts as zeros.
  void reduce_grad(const ProcessGroup& replicas);
  // Waits for the sums. A parameter that no replica has used has no gradient afterwards, as in one
  // process.
  void finish_reduction();
  // Called after finish_reduction(). If a forward of any replica has written to parameters since
  // the last call, compares the parameters of all replicas, and throws on all of them if the values
  // differ.
  void check_replicas_equal(const ProcessGroup& replicas);
  // Adds the gradients that set_gradients_aside() has set aside.
  void add_gradients_set_aside();

  int num_live_microbatches() const { return static_cast<int>(live_.size()); }
  // Drops the graphs of all microbatches and pending reductions, after a failure.
  void clear();

 private:
  PipelineStage stage_;
  std::vector<NamedTensor> reduced_;
  std::optional<wrap::ParameterWatch> list_;  // watches the module's parameters
  wrap::WriteWatch writes_;
  // Whether a forward of this rank has written to parameters since the last comparison of replicas.
  bool has_written_ = false;
  std::map<int, StageGraph> live_;  // the key is the microbatch
  std::vector<at::Tensor> aside_;   // one gradient for each parameter
  // A reduction in flight: its gradients, and a tensor with the number of replicas that have used
  // each parameter and, as the last element, the number of replicas that have written to
  // parameters.
  std::vector<at::Tensor> reducing_;
  at::Tensor num_uses_;
  std::optional<Work> reduction_;
};

}  // namespace cadre::parallel
