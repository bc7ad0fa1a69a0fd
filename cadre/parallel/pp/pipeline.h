// Trains a model whose stages lie on different ranks, microbatch by microbatch.
//
//   cadre::Pipeline pipeline({{part, {.stage = world.rank(), .num_stages = 2}}}, world,
//                            {.schedule = "1f1b", .num_microbatches = 8});
//   torch::optim::AdamW optimizer(part->parameters());
//   for (const auto& [images, labels] : batches) {       // the same batches on both ranks
//     optimizer.zero_grad();
//     pipeline.step(images, labels, loss_function);
//     optimizer.step();
//   }
//
// A step adds to the gradients what one process would get from the mean loss over the whole batch,
// also where microbatches have different sizes. The batch is used on the rank of the first stage,
// targets and loss function on that of the last one; other ranks may pass {}.
//
// Naive model parallelism is a Pipeline with one microbatch: leave num_microbatches out.
//
// Threads: one. Blocking: every method is collective on the group (and on the replicas), until its
// deadline. Lifetime: keeps the stages and the group. Errors: kInvalidArgument on all ranks for
// arguments that do not fit, before anything is computed; the group is usable then. If something
// fails during a step, all ranks throw: PipelineError on a rank that runs an action of the
// schedule, Error on other ranks. The groups have failed then, and gradients are undefined;
// rejoin() and make a new Pipeline.
// Source: torch.distributed.pipelining. docs/guide/parallel/pipeline-parallel.md,
// docs/decisions/0017.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/core/schedule/schedule.h"
#include "cadre/parallel/pp/pipeline_error.h"
#include "cadre/parallel/pp/pipeline_loss.h"
#include "cadre/parallel/pp/pipeline_stage.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/mesh/ranks.h"

namespace cadre {

struct PipelineOptions {
  // The name of a schedule (core/schedule/generate.h), for the number of stages that each rank
  // passes to the constructor; or a compute-only schedule.
  std::variant<std::string, PipelineSchedule> schedule = "1f1b";
  // The number of parts into which a batch is cut along its first dimension. The default is that of
  // the PipelineSchedule, or 1.
  std::optional<int> num_microbatches = {};
  // A batch may have rows that cannot be divided evenly by the microbatches. The sizes of
  // microbatches then differ by one row.
  bool allow_uneven_microbatches = false;
  // The shapes of every message are announced. Otherwise they are announced in the first step, and
  // again after a change of the batch's shapes or of the parameters that require grad; then a stage
  // must return the same shapes for inputs of the same shapes.
  bool dynamic_shapes = false;
  // The ranks that hold the same stages in other pipelines, each with a batch of its own: a step
  // computes the gradients of the mean over all batches. All replicas get the weights of rank 0 of
  // `replicas`. A tensor that two stages of a rank have must be in the same stages of all replicas,
  // and the same parameters must require grad.
  std::optional<Ranks> replicas = {};
  // Like `replicas`, but each rank owns a shard of the parameters of its stages, of their gradients
  // and of the optimizer's state (make the optimizer from parameters() of the pipeline). A stage is
  // gathered while the schedule computes with it, and its gradients are reduced once in a step. One
  // axis, mesh["dp_shard"]; or two, where the ranks along the first hold the same shards.
  std::optional<Ranks> shards = {};
  // The number of stages that a rank holds whole at a time, also in forward(), if `shards` is set.
  // It is one more if the schedule computes on two stages at once.
  int max_unsharded_stages = 2;
  // Called before each forward and each backward of a microbatch, to set values that depend on the
  // rows, for example the first sample of a DropoutStream.
  std::function<void(const PipelineMicrobatch&)> before_microbatch = {};
};

// A list of tensors, which may be empty.
class PipelineBatch {
 public:
  PipelineBatch() = default;
  PipelineBatch(at::Tensor tensor) {  // NOLINT: implicit by design
    if (tensor.defined()) tensors_.push_back(std::move(tensor));
  }
  PipelineBatch(std::vector<at::Tensor> tensors)  // NOLINT: implicit by design
      : tensors_(std::move(tensors)) {}

  const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  std::vector<at::Tensor> tensors_;
};

struct PipelineStepOptions {
  bool broadcast_losses = false;  // all ranks get the losses; all ranks pass the same value
  bool return_outputs = false;
  // The dimension of each returned output along which the microbatches are joined; may be negative.
  // It must count the rows; other outputs are an error.
  int64_t outputs_batch_dim = 0;
  // The limit for each wait for another rank: for its arguments, for its messages and for the
  // losses. Gradients of tied parameters, and reductions over `replicas` and `shards`, have the
  // timeouts of their groups. Default: the group's timeout.
  std::optional<Duration> timeout = {};
};

struct PipelineResult {
  // The loss of each microbatch, (num_microbatches) float64, and their mean over the rows of the
  // batch, 0-dim; on the rank of the last stage or, if requested, on all ranks. Undefined on other
  // ranks and without a loss function.
  at::Tensor losses;
  at::Tensor loss;
  // If requested, the outputs of the last stage for the whole batch, on the rank of that stage,
  // without history. A tensor of 0 dims becomes one of (num_microbatches).
  std::vector<at::Tensor> outputs;
  // The largest number of microbatches whose activations this rank has kept at one time, counted on
  // each stage.
  int peak_live_microbatches = 0;
  // The wall time, by stage, in which this rank ran the stage's forwards and backwards, including
  // waits inside of them (as in a tensor-parallel layer); zero for the stages of other ranks.
  std::vector<Duration> compute_times = {};
};

class CADRE_EXPORT Pipeline {
 public:
  // stages: those of this rank. ranks: a ProcessGroup, or a mesh of one axis. Checks on all ranks
  // that every stage is held once, by the rank that the schedule says, and that all ranks have one
  // schedule.
  Pipeline(const std::vector<PipelineStage>& stages, const Ranks& ranks,
           const PipelineOptions& options = {});
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  // Runs the forward, the backward and the reduction of gradients, but not the optimizer's step.
  // The gradient of a parameter that no rank has used stays as it was, as after backward(). Each
  // tensor of batch and target has the rows of the batch as its first dimension.
  PipelineResult step(const PipelineBatch& batch, const PipelineBatch& target,
                      const PipelineLoss& loss, const PipelineStepOptions& options = {});
  // Runs forwards only, without gradients; the loss function may be left out.
  PipelineResult forward(const PipelineBatch& batch, const PipelineBatch& target = {},
                         const PipelineLoss& loss = {},
                         const PipelineStepOptions& options = {.return_outputs = true});

  // Makes these parameters one: they get the values of the first of them now, and in every step the
  // sum of their gradients. Pass the same arguments on all ranks, in one call for each parameter of
  // the model, before the first step of an optimizer. They have the same sizes, dtype and division,
  // and either all of them require grad or none.
  void tie_parameters(const std::vector<StageParameter>& parameters);
  // Throws kInvalidArgument on all ranks if tied parameters differ, for example after an
  // optimizer's step with different options on two ranks.
  void check_tied_parameters() const;

  // Returns the parameters that this rank holds, or its shards of them, each once, for optimizers.
  // In a group of several ranks clip_grad_norm_() and GradScaler::unscale_() throw for this list,
  // because its norm is not that of the model; pass them the pipeline.
  std::vector<at::Tensor> parameters() const;
  // Returns the shards of all stages, the same list on all ranks, with an empty range if this rank
  // holds no part. So clip_grad_norm_(pipeline, 1.0) is the norm of the whole model, and a snapshot
  // of all ranks has the whole model. Axes that divide parameters, for example by
  // parallelize_module(), must come from the same mesh as the pipeline's axis. Names are those in
  // the stages' modules; snapshots need different names in different stages, as the plain module
  // has them. Tied parameters are one ParameterShard; if a rank has several tensors of it, the
  // others are copies with the same name.
  std::vector<ParameterShard> parameter_shards() const;

  // Returns the lowered schedule, which is what runs.
  const PipelineSchedule& schedule() const;

 private:
  class Core;
  Core& core() const;           // throws if the pipeline was moved from
  std::unique_ptr<Core> core_;  // is hidden, because the headers of its members are not installed
};

}  // namespace cadre
