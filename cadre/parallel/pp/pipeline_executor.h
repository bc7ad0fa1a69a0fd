// Runs one step of a lowered pipeline schedule on this rank: executes the rank's actions in order
// and passes values between stages.
//
// Threads: one thread. Blocking: run(), until the step is done on this rank. Lifetime: keeps the
// stages and the group. Errors: PipelineError, which says in which action the step failed. The
// group is then aborted, so that the step ends on all ranks, and the state of the step is dropped.
// An exception that is not a cadre::Error, for example from a stage's forward(), is converted to
// one (tensor/group/caught_error.h). docs/decisions/0017.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/schedule/schedule.h"
#include "cadre/parallel/pp/pipeline_error.h"
#include "cadre/parallel/pp/pipeline_loss.h"
#include "cadre/parallel/pp/pipeline_stage.h"
#include "cadre/parallel/pp/sharded_stages.h"
#include "cadre/parallel/pp/stage_messages.h"
#include "cadre/parallel/pp/stage_runner.h"
#include "cadre/parallel/pp/values/joined_outputs.h"
#include "cadre/tensor/group/messages/private_messages.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre::parallel {

// The arguments of a step on one rank. Batches, targets and weights have one entry for each
// microbatch.
struct PipelineStep {
  bool is_training = true;
  bool has_headers = true;
  bool keeps_outputs = false;
  int64_t outputs_batch_dim = 0;  // the dimension of the outputs that counts rows
  std::vector<std::vector<at::Tensor>> batches = {};  // only the rank of the first stage uses them
  std::vector<std::vector<at::Tensor>> targets = {};  // only the rank of the last stage uses them
  std::vector<double> weights = {};                   // weights of the microbatches' losses
  int64_t num_rows = 0;                               // the number of rows of the batch
  // The timeout of each message; if nullopt, that of the group.
  std::optional<Duration> timeout = {};
  const PipelineLoss* loss = nullptr;  // only the rank of the last stage uses it; may be null
};

class PipelineExecutor {
 public:
  struct Options {
    // The ranks that have the same stages in other pipelines; gradients are summed over them.
    std::optional<ProcessGroup> replicas = {};
    // The sharded stages, or null if ranks have whole stages. With sharded stages there are no
    // replicas.
    ShardedStages* sharded = nullptr;
    // The number of stages that an evaluation with sharded stages gathers at a time. In a training
    // step the schedule says when stages are gathered.
    int max_unsharded_stages = 1;
    // Called before each forward and each backward of a microbatch. May be empty.
    std::function<void(const PipelineMicrobatch&)> before_microbatch = {};
  };
  // `messages` is the message space of this pipeline on its group. `schedule` is a lowered
  // schedule. `stages` are the stages of this rank.
  PipelineExecutor(const PrivateMessages& messages, PipelineSchedule schedule,
                   const std::vector<PipelineStage>& stages, Options options);

  struct Output {
    std::vector<at::Tensor> losses = {};  // one loss for each microbatch, detached
    // The outputs of the last stage for the whole batch, if they are kept.
    std::vector<at::Tensor> outputs = {};
    int peak_live_microbatches = 0;            // counts a microbatch once for each stage
    std::vector<Duration> compute_times = {};  // one time for each stage
  };
  Output run(const PipelineStep& step);

  std::map<int, StageRunner>& runners() { return runners_; }
  const std::map<int, StageRunner>& runners() const { return runners_; }

 private:
  struct Running {
    const PipelineStep& step;
    Output output;
    std::optional<JoinedOutputs> kept;
    size_t num_forwards = 0;          // the number of forwards of an evaluation that have begun
    int num_losses = 0;               // the number of losses computed so far
    bool has_differentiable = false;  // whether one of these losses requires grad
  };

  void run_action(const PipelineAction& action, Running& running);
  void run_leaf(const PipelineAction& action, Running& running);
  // Runs `compute` and returns its result. Adds the elapsed time to that of the stage.
  template <typename Compute>
  auto timed(int stage, Running& running, const Compute& compute);
  // Called before an action that computes. Waits until the stage's parameters are gathered, and
  // calls before_microbatch.
  void prepare(const PipelineAction& action, Running& running);
  // Called in an evaluation. Gathers the stages of this rank's next forwards; `first` is the index
  // of the next forward.
  void gather_next_forwards(size_t first);
  // Throws if the last forward of a sharded stage has written to its parameters.
  void check_unwritten(int stage) const;
  // Returns the first row of a microbatch and the row after its last row.
  std::pair<int64_t, int64_t> rows_of(int64_t microbatch, const PipelineStep& step) const;
  void forward(const PipelineAction& action, Running& running);
  void backward(const PipelineAction& action, Running& running);
  // Returns the tensors at which the backward of the last stage starts: the loss. The list is empty
  // without a loss function.
  std::vector<at::Tensor> roots_of(int microbatch, const std::vector<at::Tensor>& outputs,
                                   Running& running) const;
  // Passes tensors to the next stage of the data flow: directly if this rank has that stage, else
  // with the send action that follows in the schedule.
  void hand_over(const StageMessages::Id& id, std::vector<at::Tensor> tensors);
  bool is_last(int stage) const { return stage == schedule_.num_stages() - 1; }
  [[noreturn]] void fail(const PipelineAction& action, const Error& error);

  ProcessGroup group_;
  PipelineSchedule schedule_;
  Options options_;
  std::map<int, StageRunner> runners_;  // the key is the stage
  std::vector<int> forwards_;           // the stage of each forward of this rank, in order
  StageMessages messages_;
  std::map<StageMessages::Id, std::vector<at::Tensor>> to_send_;
};

}  // namespace cadre::parallel
