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

// What a rank is given of a step, by microbatch.
struct PipelineStep {
  bool is_training = true;
  bool has_headers = true;
  bool keeps_outputs = false;
  int64_t outputs_batch_dim = 0;  // which dimension of the kept outputs counts rows
  std::vector<std::vector<at::Tensor>> batches = {};  // on the rank of the first stage
  std::vector<std::vector<at::Tensor>> targets = {};  // on that of the last one
  std::vector<double> weights = {};                   // weights of the microbatches' losses
  int64_t num_rows = 0;                               // rows of the batch
  const PipelineLoss* loss = nullptr;                 // on the rank of the last stage, if wanted
};

class PipelineExecutor {
 public:
  struct Options {
    // Sum the gradients of each stage; of the same stages.
    std::optional<ProcessGroup> replicas = {};
    // The parameters of the stages, where ranks own shards of them; instead of replicas.
    ShardedStages* sharded = nullptr;
    // With `sharded`, in an evaluation; a training step does what the schedule says.
    int max_unsharded_stages = 1;
    // Before each forward and each backward of a microbatch. May be empty.
    std::function<void(const PipelineMicrobatch&)> before_microbatch = {};
  };
  // schedule: lowered. stages: those of this rank.
  // messages: of this pipeline, on its group.
  PipelineExecutor(const PrivateMessages& messages, PipelineSchedule schedule,
                   const std::vector<PipelineStage>& stages, Options options);

  struct Output {
    std::vector<at::Tensor> losses = {};       // by microbatch, without history
    std::vector<at::Tensor> outputs = {};      // the last stage's, for the whole batch, if kept
    int peak_live_microbatches = 0;            // counted on each stage
    std::vector<Duration> compute_times = {};  // by stage
  };
  Output run(const PipelineStep& step);

  std::map<int, StageRunner>& runners() { return runners_; }
  const std::map<int, StageRunner>& runners() const { return runners_; }

 private:
  struct Running {
    const PipelineStep& step;
    Output output;
    std::optional<JoinedOutputs> kept;
    size_t num_forwards = 0;          // begun ones of an evaluation
    int num_losses = 0;               // computed
    bool has_differentiable = false;  // any of these
  };

  void run_action(const PipelineAction& action, Running& running);
  void run_leaf(const PipelineAction& action, Running& running);
  // What `compute` returns; its time is counted for the stage.
  template <typename Compute>
  auto timed(int stage, Running& running, const Compute& compute);
  // Before an action that computes: whole parameters, and the program's call.
  void prepare(const PipelineAction& action, Running& running);
  // In an evaluation: the stages of the next forwards of this rank, from this one on.
  void gather_next_forwards(size_t first);
  // Throws if the last forward of a sharded stage has written to its parameters.
  void check_unwritten(int stage) const;
  // The first row of a microbatch, and the one behind its last.
  std::pair<int64_t, int64_t> rows_of(int64_t microbatch, const PipelineStep& step) const;
  void forward(const PipelineAction& action, Running& running);
  void backward(const PipelineAction& action, Running& running);
  // The last stage's roots of the backward: its loss, where there is one.
  std::vector<at::Tensor> roots_of(int microbatch, const std::vector<at::Tensor>& outputs,
                                   Running& running) const;
  // To the neighbour that needs it: at once if this rank has it, else by the send that follows.
  void hand_over(const StageMessages::Id& id, std::vector<at::Tensor> tensors);
  bool is_last(int stage) const { return stage == schedule_.num_stages() - 1; }
  [[noreturn]] void fail(const PipelineAction& action, const Error& error);

  ProcessGroup group_;
  PipelineSchedule schedule_;
  Options options_;
  std::map<int, StageRunner> runners_;  // by stage
  std::vector<int> forwards_;           // stages of this rank's forwards, in order
  StageMessages messages_;
  std::map<StageMessages::Id, std::vector<at::Tensor>> to_send_;
};

}  // namespace cadre::parallel
