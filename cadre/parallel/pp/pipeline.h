// Trains a model whose stages are on different ranks (pipeline parallelism), one microbatch after
// the other.
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
// A step adds to the gradients what one process would compute from the mean loss over the whole
// batch, even if microbatches have different sizes. Only the rank of the first stage uses the
// batch, and only the rank of the last stage uses the targets and the loss function; other ranks
// may pass {}.
//
// Without num_microbatches there is one microbatch, so that only one stage computes at a time
// (naive model parallelism).
//
// Threads: one thread. Blocking: every method is collective on the group (and on the replicas),
// until the group's deadline. Lifetime: keeps the stages and the group. Errors: kInvalidArgument on
// all ranks for invalid arguments, before anything is computed; the group stays usable. If
// something fails during a step, all ranks throw: PipelineError on a rank that was running an
// action of the schedule, Error on other ranks. Then the groups have failed and gradients are
// undefined; call rejoin() and make a new Pipeline.
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
  // The name of a schedule (core/schedule/generate.h), which is generated for the number of stages
  // that each rank passes to the constructor; or a PipelineSchedule without communication actions,
  // which the constructor adds.
  std::variant<std::string, PipelineSchedule> schedule = "1f1b";
  // The number of microbatches into which a batch is divided along its first dimension. Default:
  // that of the PipelineSchedule, or 1.
  std::optional<int> num_microbatches = {};
  // If true, the number of rows of a batch need not be divisible by the number of microbatches. The
  // sizes of microbatches then differ by one row.
  bool allow_uneven_microbatches = false;
  // If true, every message is preceded by a header with its shapes. If false, headers are sent only
  // in the first step, and again after a change of the batch's shapes or of the parameters that
  // require grad. In between a stage must return the same shapes for inputs of the same shapes.
  bool dynamic_shapes = false;
  // The ranks that have the same stages in other pipelines, each with its own batch (data
  // parallelism). A step computes the gradients of the mean over all batches. All replicas get the
  // weights of rank 0 of `replicas`. The same parameters must require grad in all replicas, and a
  // tensor that two stages share must be shared by the same stages in all replicas.
  std::optional<Ranks> replicas = {};
  // The ranks that have the same stages in other pipelines, as in `replicas`, but each of these
  // ranks owns a shard of the parameters of its stages, of their gradients and of the optimizer's
  // state. Make the optimizer from parameters() of the pipeline. The parameters of a stage are
  // gathered while the schedule computes with the stage, and its gradients are reduced once in each
  // step. Pass a mesh of one axis, such as mesh["dp_shard"], or of two axes, where the ranks along
  // the first axis have the same shards.
  std::optional<Ranks> shards = {};
  // If `shards` is set: the largest number of stages whose parameters a rank has gathered at a
  // time, also in forward(). The limit is one more if the schedule computes with two stages at
  // once.
  int max_unsharded_stages = 2;
  // Called before each forward and each backward of a microbatch. Use it to set values that depend
  // on the rows, such as DropoutStream::first_sample.
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
  bool broadcast_losses = false;  // true: all ranks get the losses; must be equal on all ranks
  bool return_outputs = false;
  // The dimension of each returned output along which the outputs of the microbatches are
  // concatenated. May be negative. Its size must be the number of rows; other outputs are an error.
  int64_t outputs_batch_dim = 0;
  // The limit for each wait for another rank: for its arguments, for its messages and for the
  // losses. The sums of gradients of tied parameters, and reductions over `replicas` and `shards`,
  // use the timeouts of their groups instead. Default: the group's timeout.
  std::optional<Duration> timeout = {};
};

struct PipelineResult {
  // The loss of each microbatch, (num_microbatches) float64, and their mean over the rows of the
  // batch, shape (). Defined on the rank of the last stage or, if requested, on all ranks.
  // Undefined on other ranks, and without a loss function.
  at::Tensor losses;
  at::Tensor loss;
  // If requested, the outputs of the last stage for the whole batch, detached from the graph. Only
  // the rank of that stage has them. Outputs of shape () become one tensor of shape
  // (num_microbatches).
  std::vector<at::Tensor> outputs;
  // The largest number of microbatches whose activations this rank has kept at one time. A
  // microbatch counts once for each stage that keeps it.
  int peak_live_microbatches = 0;
  // The wall time of the forwards and backwards of each stage on this rank, including waits inside
  // of them, such as those of a tensor-parallel layer. Zero for the stages of other ranks. For a
  // stage on a device, the time in which the host enqueued them.
  std::vector<Duration> compute_times = {};
};

class CADRE_EXPORT Pipeline {
 public:
  // `stages` are the stages of this rank. `ranks` is a ProcessGroup, or a mesh of one axis. Checks
  // on all ranks that exactly one rank passes each stage, as the schedule says, and that all ranks
  // have the same schedule.
  Pipeline(const std::vector<PipelineStage>& stages, const Ranks& ranks,
           const PipelineOptions& options = {});
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  // Runs the forward, the backward and the reduction of gradients, but not the optimizer. If no
  // rank has used a parameter, its gradient stays as it was, as after backward(). The first
  // dimension of each tensor of batch and target is the rows of the batch.
  PipelineResult step(const PipelineBatch& batch, const PipelineBatch& target,
                      const PipelineLoss& loss, const PipelineStepOptions& options = {});
  // Runs forwards only, without recording a graph. The loss function may be left out.
  PipelineResult forward(const PipelineBatch& batch, const PipelineBatch& target = {},
                         const PipelineLoss& loss = {},
                         const PipelineStepOptions& options = {.return_outputs = true});

  // Ties these parameters, so that they act as one parameter of the model: all of them get the
  // values of the first one now, and in every step the sum of their gradients. Pass the same
  // arguments on all ranks, and all parameters of one tie in one call, before the first step of an
  // optimizer. The parameters must have the same sizes, dtype and division, and either all or none
  // of them require grad.
  void tie_parameters(const std::vector<StageParameter>& parameters);
  // Throws kInvalidArgument on all ranks if the values of tied parameters differ, for example after
  // the ranks' optimizers used different options.
  void check_tied_parameters() const;

  // Returns the parameters that this rank has, or its shards of them, each once, for an optimizer.
  // In a group of several ranks clip_grad_norm_() and GradScaler::unscale_() throw for this list,
  // because its norm is not that of the model. Pass them the pipeline instead.
  std::vector<at::Tensor> parameters() const;
  // Returns the ParameterShards of all stages, the same list on all ranks; if this rank has no part
  // of a parameter, its range is empty. So clip_grad_norm_(pipeline, 1.0) uses the norm of the
  // whole model, and a snapshot of all ranks has the whole model. Other axes that divide
  // parameters, for example by parallelize_module(), must come from the same mesh as the pipeline's
  // axis. Names are those in the modules of the stages. For snapshots they must differ between
  // stages, as they do in the undivided model. Tied parameters are one ParameterShard; if a rank
  // has several tensors of a tie, the others are listed as copies with the same name.
  std::vector<ParameterShard> parameter_shards() const;

  // Returns the lowered schedule, with the communication actions, that the pipeline runs.
  const PipelineSchedule& schedule() const;

 private:
  class Core;
  Core& core() const;           // throws if the pipeline was moved from
  std::unique_ptr<Core> core_;  // hidden: the headers of its members are not installed
};

}  // namespace cadre
