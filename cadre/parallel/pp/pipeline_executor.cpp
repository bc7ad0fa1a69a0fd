#include "cadre/parallel/pp/pipeline_executor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <exception>
#include <set>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/parallel/pp/values/stage_values.h"
#include "cadre/tensor/group/caught_error.h"
#include "cadre/tensor/hooks/autograd_hooks.h"

namespace cadre::parallel {
namespace {

using Kind = PipelineActionKind;
using Id = StageMessages::Id;

Id forward_id(int stage, int microbatch) {
  return {StageMessages::Kind::kForward, stage, microbatch};
}
Id backward_id(int stage, int microbatch) {
  return {StageMessages::Kind::kBackward, stage, microbatch};
}

// Returns whether this action of the schedule also runs in an evaluation.
bool is_of_forward(Kind kind) {
  return kind == Kind::kForward || kind == Kind::kSendForward || kind == Kind::kRecvForward;
}

// Returns the description of an action for error messages.
std::string_view words_of(Kind kind) {
  switch (kind) {
    case Kind::kForward:
      return "forward";
    case Kind::kBackward:
      return "backward";
    case Kind::kInputGrad:
      return "gradient of the input";
    case Kind::kWeightGrad:
      return "gradients of the weights";
    case Kind::kSendForward:
      return "send of the output";
    case Kind::kRecvForward:
      return "receive of the input";
    case Kind::kSendBackward:
      return "send of the input's gradient";
    case Kind::kRecvBackward:
      return "receive of the output's gradient";
    case Kind::kReduceGrad:
      return "reduction of the gradients";
    case Kind::kUnshard:
      return "gathering of the parameters";
    case Kind::kReshard:
      return "release of the parameters";
    default:
      return "action";
  }
}

std::vector<at::Tensor> leaves_for_next_stage(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& output : outputs) {
    if (!output.defined()) {
      throw Error(ErrorCode::kInvalidArgument, "the stage returned an undefined tensor");
    }
    leaves.push_back(own_values(output));
    leaves.back().requires_grad_(output.requires_grad() && at::GradMode::is_enabled());
  }
  return leaves;
}

// Returns, for each stage, the parameters whose gradients are complete when the stage is reduced.
// If several stages of this rank share a tensor, it is reduced with the last of them.
std::map<int, std::vector<NamedTensor>> reduced_parameters(
    const std::vector<PipelineStage>& stages, const std::vector<PipelineAction>& actions) {
  std::map<int, std::vector<NamedTensor>> reduced;
  std::set<const void*> taken;
  for (auto action = actions.rbegin(); action != actions.rend(); ++action) {
    if (action->kind != Kind::kReduceGrad) continue;
    const auto stage = std::ranges::find(stages, action->stage, &PipelineStage::stage);
    for (const NamedTensor& parameter : stage->parameters()) {
      if (!taken.insert(parameter.tensor.unsafeGetTensorImpl()).second) continue;
      reduced[action->stage].push_back(parameter);
    }
  }
  return reduced;
}

}  // namespace

PipelineExecutor::PipelineExecutor(const PrivateMessages& messages, PipelineSchedule schedule,
                                   const std::vector<PipelineStage>& stages, Options options)
    : group_(messages.group()),
      schedule_(std::move(schedule)),
      options_(std::move(options)),
      messages_(messages, {schedule_.rank_of_stage, schedule_.num_microbatches}) {
  const auto& actions = schedule_.ranks[static_cast<size_t>(group_.rank())];
  auto reduced = reduced_parameters(stages, actions);
  for (const PipelineStage& stage : stages) {
    runners_.emplace(stage.stage(), StageRunner(stage, std::move(reduced[stage.stage()])));
  }
  for (const PipelineAction& action : actions) {
    for (const PipelineAction& leaf : leaves_of(action)) {
      if (leaf.kind == Kind::kForward) forwards_.push_back(leaf.stage);
    }
  }
}

template <typename Compute>
auto PipelineExecutor::timed(int stage, Running& running, const Compute& compute) {
  class Watch {
   public:
    Watch(os::System& system, Duration& total)
        : system_(system), total_(total), began_(system.now()) {}
    ~Watch() { total_ += system_.now() - began_; }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    os::System& system_;
    Duration& total_;
    const TimePoint began_;
  };
  const Watch watch(group_.communicator().system(),
                    running.output.compute_times[static_cast<size_t>(stage)]);
  return compute();
}

// An evaluation does not use the gathers and frees of the schedule, because these are for training.
// It gathers the next stages here.
void PipelineExecutor::gather_next_forwards(size_t first) {
  const size_t count =
      std::min(static_cast<size_t>(options_.max_unsharded_stages), runners_.size());
  std::vector<int> next;
  for (size_t i = first; i < forwards_.size() && next.size() < count; ++i) {
    if (std::ranges::count(next, forwards_[i]) == 0) next.push_back(forwards_[i]);
  }
  options_.sharded->unshard_only(next);
}

PipelineExecutor::Output PipelineExecutor::run(const PipelineStep& step) {
  Running running{.step = step, .output = {}, .kept = {}};
  running.output.losses.resize(static_cast<size_t>(schedule_.num_microbatches));
  if (step.keeps_outputs) {
    running.kept.emplace(schedule_.num_microbatches, step.outputs_batch_dim);
  }
  running.output.compute_times.resize(static_cast<size_t>(schedule_.num_stages()));
  messages_.begin(
      {.is_training = step.is_training, .has_headers = step.has_headers, .timeout = step.timeout});
  const at::AutoGradMode grad_mode(step.is_training);
  PipelineAction last = {};
  const auto& actions = schedule_.ranks[static_cast<size_t>(group_.rank())];
  for (const PipelineAction& action : actions) {
    for (const PipelineAction& leaf : leaves_of(action)) {
      if (!step.is_training && !is_of_forward(leaf.kind)) continue;
      last = leaf;
      run_action(leaf, running);
    }
  }
  try {
    messages_.finish();
    for (auto& [stage, runner] : runners_) runner.finish_reduction();
    if (options_.replicas) {
      for (auto& [stage, runner] : runners_) runner.check_replicas_equal(*options_.replicas);
    }
    if (options_.sharded != nullptr) {
      options_.sharded->reshard_all();
      if (step.is_training) options_.sharded->finish_reductions();
    }
    if (running.kept) running.output.outputs = running.kept->join();
  } catch (...) {
    fail(last, caught_error().with_context("the end of the step, after"));
  }
  return std::move(running.output);
}

void PipelineExecutor::run_action(const PipelineAction& action, Running& running) {
  try {
    run_leaf(action, running);
  } catch (...) {
    fail(action, caught_error());
  }
}

void PipelineExecutor::fail(const PipelineAction& action, const Error& error) {
  std::string where = format("cadre::Pipeline: stage {}", action.stage);
  if (action.microbatch) where += format(", microbatch {}", *action.microbatch);
  where += format(", {} ({})", words_of(action.kind), to_text(action));
  const Error named = error.with_context(where);
  // If the group has failed already, abort() changes nothing, so that the first failure is kept.
  group_.abort(named.message());
  messages_.clear();
  to_send_.clear();
  for (auto& [stage, runner] : runners_) runner.clear();
  wrap::release_failed_backward();
  throw PipelineError(named, action);
}

void PipelineExecutor::run_leaf(const PipelineAction& action, Running& running) {
  const int stage = action.stage;
  const int microbatch = action.microbatch.value_or(0);
  if (is_computation(action.kind)) prepare(action, running);
  switch (action.kind) {
    case Kind::kForward:
      return forward(action, running);
    case Kind::kBackward:
    case Kind::kInputGrad:
      return backward(action, running);
    case Kind::kWeightGrad:
      return timed(stage, running, [&] { runners_.at(stage).weight_grad(microbatch); });
    case Kind::kSendForward: {
      const Id id = forward_id(stage + 1, microbatch);
      return messages_.send(id, to_send_.extract(id).mapped());
    }
    case Kind::kSendBackward: {
      const Id id = backward_id(stage - 1, microbatch);
      return messages_.send(id, to_send_.extract(id).mapped());
    }
    case Kind::kRecvForward:
      return messages_.post_receive(forward_id(stage, microbatch));
    case Kind::kRecvBackward:
      return messages_.post_receive(backward_id(stage, microbatch));
    case Kind::kReduceGrad:
      if (options_.sharded != nullptr) options_.sharded->reduce(stage);
      if (options_.replicas) runners_.at(stage).reduce_grad(*options_.replicas);
      return;
    case Kind::kUnshard:
      return options_.sharded->unshard(stage);
    case Kind::kReshard:
      return options_.sharded->reshard(stage);
    case Kind::kOverlap:
      throw Error(ErrorCode::kInternal, "a step cannot run an action of this kind");
  }
}

void PipelineExecutor::prepare(const PipelineAction& action, Running& running) {
  const PipelineStep& step = running.step;
  if (options_.sharded != nullptr) {
    if (!step.is_training) gather_next_forwards(running.num_forwards++);
    options_.sharded->wait(action.stage);
  }
  if (!options_.before_microbatch) return;
  const auto [first, end] = rows_of(*action.microbatch, step);
  options_.before_microbatch({.stage = action.stage,
                              .index = *action.microbatch,
                              .first_row = first,
                              .num_rows = end - first});
}

std::pair<int64_t, int64_t> PipelineExecutor::rows_of(int64_t microbatch,
                                                      const PipelineStep& step) const {
  return {step.num_rows * microbatch / schedule_.num_microbatches,
          step.num_rows * (microbatch + 1) / schedule_.num_microbatches};
}

void PipelineExecutor::forward(const PipelineAction& action, Running& running) {
  const int microbatch = *action.microbatch;
  const PipelineStep& step = running.step;
  const std::vector<at::Tensor> inputs = action.stage == 0
                                             ? step.batches[static_cast<size_t>(microbatch)]
                                             : messages_.take(forward_id(action.stage, microbatch));
  const bool is_at_end = is_last(action.stage);
  const auto roots = [&](const std::vector<at::Tensor>& computed) {
    return is_at_end ? roots_of(microbatch, computed, running) : computed;
  };
  const std::vector<at::Tensor> outputs = timed(action.stage, running, [&] {
    return runners_.at(action.stage).forward(microbatch, inputs, roots);
  });
  if (options_.sharded != nullptr) check_unwritten(action.stage);
  if (!is_at_end) {
    hand_over(forward_id(action.stage + 1, microbatch), leaves_for_next_stage(outputs));
  } else if (running.kept) {
    const auto [first, end] = rows_of(microbatch, step);
    running.kept->add({.index = microbatch, .num_rows = end - first}, outputs);
  }
  int num_live = 0;
  for (const auto& [stage, runner] : runners_) num_live += runner.num_live_microbatches();
  running.output.peak_live_microbatches = std::max(running.output.peak_live_microbatches, num_live);
}

void PipelineExecutor::check_unwritten(int stage) const {
  const auto written = runners_.at(stage).written_parameter();
  if (!written) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      format("forward() has written to \"{}\" of stage {}, whose values are in shards: what it "
             "has written would be lost when the whole parameter is freed. Compute it from a "
             "parameter that forward() does not change, or let every rank have whole stages",
             *written, stage));
}

std::vector<at::Tensor> PipelineExecutor::roots_of(int microbatch,
                                                   const std::vector<at::Tensor>& outputs,
                                                   Running& running) const {
  const PipelineStep& step = running.step;
  if (step.loss == nullptr || !*step.loss) return {};
  const auto index = static_cast<size_t>(microbatch);
  const at::Tensor loss = (*step.loss)(outputs, step.targets[index]);
  if (!loss.defined() || loss.numel() != 1 || !loss.is_floating_point()) {
    throw Error(ErrorCode::kInvalidArgument,
                "the loss function must return one floating-point number, the mean over the rows "
                "of the microbatch");
  }
  running.output.losses[index] = own_values(loss);
  running.has_differentiable |= loss.requires_grad();
  if (++running.num_losses == schedule_.num_microbatches && step.is_training &&
      !running.has_differentiable) {
    throw Error(ErrorCode::kInvalidArgument,
                "no loss of the step requires grad, so no parameter would get a gradient: the loss "
                "function has detached its result, or nothing that it depends on requires grad");
  }
  return {loss};
}

void PipelineExecutor::backward(const PipelineAction& action, Running& running) {
  const PipelineStep& step = running.step;
  const std::vector<at::Tensor>& losses = running.output.losses;
  const int microbatch = *action.microbatch;
  StageRunner& runner = runners_.at(action.stage);
  std::vector<at::Tensor> gradients;
  if (is_last(action.stage)) {
    const auto index = static_cast<size_t>(microbatch);
    gradients = {at::full_like(losses[index], step.weights[index])};
  } else {
    gradients = messages_.take(backward_id(action.stage, microbatch));
  }
  auto of_inputs = timed(action.stage, running, [&] {
    return action.kind == Kind::kBackward ? runner.backward(microbatch, gradients)
                                          : runner.input_grad(microbatch, gradients);
  });
  if (action.stage > 0) {
    for (at::Tensor& gradient : of_inputs) gradient = own_values(gradient);
    hand_over(backward_id(action.stage - 1, microbatch), std::move(of_inputs));
  }
}

void PipelineExecutor::hand_over(const Id& id, std::vector<at::Tensor> tensors) {
  if (schedule_.rank_of_stage[static_cast<size_t>(id.stage)] == group_.rank()) {
    messages_.put(id, std::move(tensors));
  } else {
    to_send_[id] = std::move(tensors);
  }
}

}  // namespace cadre::parallel
