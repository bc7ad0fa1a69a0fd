// Runs one step of a lowered pipeline schedule on this rank: its actions in their order, with the
// values that stages hand to each other.
//
// Threads: one. Blocking: run(), until the step is done on this rank. Lifetime: keeps the stages
// and the group. Errors: PipelineError, which says at which action; the group is aborted then, so
// that the step ends on all ranks, and what was kept of the step is dropped.
// What is thrown that is no cadre::Error, such as out of a stage's forward(), becomes one
// (tensor/group/caught_error.h). docs/decisions/0017.
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

// The arguments of a step on one rank. Batches, targets and weights are listed by microbatch.
struct PipelineStep {
  bool is_training = true;
  bool has_headers = true;
  bool keeps_outputs = false;
  int64_t outputs_batch_dim = 0;  // the dimension of the kept outputs that counts rows
  std::vector<std::vector<at::Tensor>> batches = {};  // only the rank of the first stage uses them
  std::vector<std::vector<at::Tensor>> targets = {};  // only the rank of the last stage uses them
  std::vector<double> weights = {};                   // the weights of the microbatches' losses
  int64_t num_rows = 0;                               // the number of rows of the batch
  // The limit of each message; the default is that of the group.
  std::optional<Duration> timeout = {};
  const PipelineLoss* loss = nullptr;  // only the rank of the last stage uses it; may be null
};

class PipelineExecutor {
 public:
  struct Options {
    // The ranks with the same stages in other pipelines, over which gradients are summed.
    std::optional<ProcessGroup> replicas = {};
    // The parameters of the stages, if ranks own shards of them. Then there are no replicas.
    ShardedStages* sharded = nullptr;
    // The number of stages that an evaluation with `sharded` gathers at a time. In a training step
    // the schedule says which stages are gathered.
    int max_unsharded_stages = 1;
    // Called before each forward and each backward of a microbatch. May be empty.
    std::function<void(const PipelineMicrobatch&)> before_microbatch = {};
  };
  // messages: the message space of this pipeline, on its group. schedule: a lowered one. stages:
  // the stages of this rank.
  PipelineExecutor(const PrivateMessages& messages, PipelineSchedule schedule,
                   const std::vector<PipelineStage>& stages, Options options);

  struct Output {
    std::vector<at::Tensor> losses = {};  // has one loss for each microbatch, without history
    // The outputs of the last stage for the batch, if they are kept.
    std::vector<at::Tensor> outputs = {};
    int peak_live_microbatches = 0;            // counts a microbatch once for each stage
    std::vector<Duration> compute_times = {};  // has one time for each stage
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
    bool has_differentiable = false;  // one of these losses requires grad
  };

  void run_action(const PipelineAction& action, Running& running);
  void run_leaf(const PipelineAction& action, Running& running);
  // Runs `compute` and returns its result. Adds the time to that of the stage.
  template <typename Compute>
  auto timed(int stage, Running& running, const Compute& compute);
  // Called before an action that computes: waits for whole parameters and calls before_microbatch.
  void prepare(const PipelineAction& action, Running& running);
  // Called in an evaluation: gathers the stages of the next forwards of this rank, from `first` on.
  void gather_next_forwards(size_t first);
  // Throws if the last forward of a sharded stage has written to its parameters.
  void check_unwritten(int stage) const;
  // Returns the first row of a microbatch, and the row after its last one.
  std::pair<int64_t, int64_t> rows_of(int64_t microbatch, const PipelineStep& step) const;
  void forward(const PipelineAction& action, Running& running);
  void backward(const PipelineAction& action, Running& running);
  // Returns the roots of the backward of the last stage: its loss, if there is a loss function.
  std::vector<at::Tensor> roots_of(int microbatch, const std::vector<at::Tensor>& outputs,
                                   Running& running) const;
  // Passes tensors to the stage that needs them: directly if this rank has that stage, else in the
  // send that follows.
  void hand_over(const StageMessages::Id& id, std::vector<at::Tensor> tensors);
  bool is_last(int stage) const { return stage == schedule_.num_stages() - 1; }
  [[noreturn]] void fail(const PipelineAction& action, const Error& error);

  ProcessGroup group_;
  PipelineSchedule schedule_;
  Options options_;
  std::map<int, StageRunner> runners_;  // the runners; the key is the stage
  std::vector<int> forwards_;           // the stages of this rank's forwards, in order
  StageMessages messages_;
  std::map<StageMessages::Id, std::vector<at::Tensor>> to_send_;
};

}  // namespace cadre::parallel
