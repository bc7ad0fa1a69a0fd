#include "cadre/train/trainer/trainer.h"

#include <ATen/Context.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/tensor/group/caught_error.h"
#include "cadre/tensor/hooks/autocast.h"
#include "cadre/train/checkpoint/optimizer_state.h"
#include "cadre/train/trainer/config/agreed_config.h"
#include "cadre/train/trainer/config/common_error.h"
#include "cadre/train/trainer/config/config_file.h"
#include "cadre/train/trainer/config/schedule.h"
#include "cadre/train/trainer/models/model.h"
#include "cadre/train/trainer/planning/config_plan.h"
#include "cadre/train/trainer/planning/plan_report.h"
#include "cadre/train/trainer/run/run_setup.h"
#include "cadre/train/trainer/strategy/device_support.h"

namespace cadre::train {
namespace {

double seconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// Returns the states of the default generators of a type of device, in rank order.
std::vector<at::Tensor> generators_of_all_ranks(const ProcessGroup& world,
                                                const c10::Device& device) {
  const at::Tensor own = at::globalContext().defaultGenerator(device).get_state();
  const at::Tensor all = torch::empty({world.world_size() * own.numel()}, torch::kByte);
  world.all_gather(all, own);
  return all.view({world.world_size(), own.numel()}).unbind();
}

}  // namespace

Trainer::Trainer(const Config& config, TrainerContext context)
    : config_(config),
      context_(std::move(context)),
      run_path_(config.run.folder + "/" + config.run.name),
      snapshots_(run_path_) {
  at::set_num_threads(static_cast<int>(config.run.threads));
  check_common(context_.world, [this] { return agreed_config(config_); });
  on_first_rank(context_.world, [this] {
    run_folder_ = std::make_unique<RunFolder>(run_path_);
    if (context_.attempt == 0) run_folder_->forget_job();
  });
  on_all_ranks(context_.world, [this] { prepare(); });
  check_common(context_.world, [this] {
    std::vector<AgreedField> fields = agreed_inputs(*task_, weights_);
    fields.push_back({"the type of the device", type_name(context_.device)});
    fields.push_back({"the number of parameters", std::to_string(num_parameters_)});
    fields.push_back({"the snapshot of run.resume",
                      resumption_ ? resumption_->identity() : std::string("none")});
    return fields;
  });
  layout_ = lay_out(config_, context_.world, context_.device);
  with_common_errors([this] { make_loaders(); });
  strategy_ = make_strategy(config_, model_, *layout_,
                            resumption_ ? resumption_->bucket_layout() : std::nullopt);
  if (layout_->degrees.pipeline > 1) model_.reset();
  if (resumption_) {
    resumption_->restore(*strategy_, context_.world);
  } else if (is_deferred()) {
    with_common_errors([this] { load_weights(); });
  }
  on_first_rank(context_.world, [this] { open_run_folder(); });
  with_common_errors([this] {
    snapshot_writer_ = std::make_unique<SnapshotWriter>(
        snapshots_, context_.world, *strategy_,
        SaveOptions{.strategy = layout_name(config_.parallel), .groups = groups_of_axes()});
  });
  if (resumption_) {
    for (const std::string& remark : resumption_->remarks()) print_line(remark);
  }
  resumption_.reset();
  print_header();
}

Trainer::~Trainer() = default;

void Trainer::prepare() {
  const int world_size = context_.world.world_size();
  place_replicas(config_.parallel, context_.world.communicator().hosts());
  check_layout(config_, world_size);
  check_device(config_, context_.device);
  if (!config_.model.weights.empty()) weights_ = InitialWeights::open(config_.model.weights);
  task_ = open_task(config_, context_.system.deadline_in(kTextSourceTimeout));
  check_global_batch_size(config_, *task_, degrees_of(config_.parallel, world_size).num_shares());
  resolve_epochs(config_, *task_);
  model_ = is_deferred() ? make_deferred_model(*task_) : make_initial_model(config_, *task_);
  if (weights_ && !is_deferred()) weights_->check_unchanged();
  num_parameters_ = num_parameters(*model_);
  // The wrapper moves a deferred model, when it computes its values.
  if (!context_.device.is_cpu() && !is_deferred()) model_->to(context_.device);
  RunConfig run = config_.run;
  const bool goes_on = context_.attempt > 0 && is_run_of_job(run_path_, context_.job);
  if (goes_on) run.resume = "auto";
  const std::optional<std::string> snapshot = find_snapshot(run, snapshots_);
  if (!snapshot) return;
  resumption_ = Resumption::open(*snapshot, config_, *task_);
  const TrainState& state = resumption_->state();
  first_step_ = step_ = saved_step_ = state.step;
  best_held_out_loss_ = saved_best_loss_ = state.best_held_out_loss;
  resumption_->restore_generators(context_.world.rank(), context_.device);
}

void Trainer::make_loaders() {
  const bool is_pinned = !context_.device.is_cpu();
  loader_ = make_training_loader(config_, *task_, layout_->data.group, is_pinned);
  if (resumption_) loader_->seek(resumption_->state().loader);
  loader_at_step_ = loader_->position();
  held_out_loader_ = make_held_out_loader(*task_, layout_->data, is_pinned);
}

// Fills the ranks' shards from model.weights. A model that is not sharded got these values in
// prepare().
void Trainer::load_weights() {
  const bool is_loaded = load_initial_weights(config_, strategy_->parts(), context_.world);
  if (!is_loaded) return;
  on_all_ranks(context_.world, [this] { weights_->check_unchanged(); });
}

void Trainer::open_run_folder() {
  std::optional<BranchPoint> start;
  if (resumption_) {
    start = {.snapshot = resumption_->snapshot(),
             .step = step_,
             .best_loss = best_held_out_loss_,
             .has_steps_left = step_ < config_.run.steps};
  }
  const RunFolder::Moved moved = run_folder_->begin(start);
  if (!context_.job.empty()) run_folder_->record_job(context_.job);
  progress_ = std::make_unique<Progress>(ProgressOptions{.print = context_.print,
                                                         .is_terminal = context_.is_terminal,
                                                         .num_columns = context_.num_columns,
                                                         .metrics_path = metrics_path_of(run_path_),
                                                         .keep_metrics_until_step = first_step_});
  if (!moved.earlier_run.empty()) {
    print_line(cadre::format("an earlier run of this name was moved to {}", moved.earlier_run));
  }
  if (start) print_line(cadre::format("resuming from {}", start->snapshot));
  if (moved.abandoned) {
    print_line(cadre::format("the snapshots and metrics of later steps were moved to {}",
                             *moved.abandoned));
  }
}

void Trainer::print_header() {
  const RunConfig& run = config_.run;
  const bool is_text = task_->items_per_sample() > 1;
  print_line(cadre::format("{} of {} parameters on {}; {} steps of {} samples{}",
                           config_.model.kind, num_parameters_, task_->data_text(), run.steps,
                           run.global_batch_size,
                           is_text ? cadre::format(" of {} tokens", config_.model.context) : ""));
  on_first_rank(context_.world, [this] {
    const int count = context_.world.world_size();
    print_line(start_table(plan_of_config(
        config_, sizes_of_model(config_),
        {.count = count, .per_host = count, .on_devices = !context_.device.is_cpu()})));
  });
  if (step_ >= run.steps) {
    print_line(
        cadre::format("run.steps is {}, and the snapshot is of step {}: no steps are left; set "
                      "a larger run.steps to continue",
                      run.steps, step_));
  }
}

TrainResult Trainer::run() {
  run_started_ = context_.system.now();
  try {
    train_to_the_end();
    finish();
  } catch (...) {
    finish_snapshot_of_failed_run();
    throw;
  }
  return result_;
}

void Trainer::train_to_the_end() {
  while (step_ < config_.run.steps && !result_.was_stopped) {
    for (const Batch& batch : loader_->epoch(loader_->position().epoch)) {
      const StepSums sums = step(batch);
      result_.loss = sums.loss;
      result_.was_stopped = sums.stop && step_ < config_.run.steps;
      result_.was_preempted = result_.was_stopped && sums.is_preempted;
      if (result_.was_stopped || step_ == config_.run.steps) break;
      if (config_.run.evaluate_every > 0 && step_ % config_.run.evaluate_every == 0) evaluate();
      if (config_.run.snapshot_every > 0 && step_ % config_.run.snapshot_every == 0) {
        begin_snapshot();
      }
    }
    // If the run ends with the last step of an epoch, the position is not needed any more.
    if (!result_.was_stopped && step_ < config_.run.steps) {
      loader_->seek({.epoch = loader_->position().epoch + 1, .samples = 0});
      loader_at_step_ = loader_->position();
    }
  }
}

Trainer::StepSums Trainer::step(const Batch& batch) {
  const TimePoint started = context_.system.now();
  const Duration communicated = time_in_communication();
  ScalarSum loss =
      strategy_->backward(*task_, on_device(batch),
                          {.num_parts = config_.run.accumulate,
                           .rows = rows_of_rank(*loader_, step_, layout_->data),
                           .around_forward = [this](const std::function<at::Tensor()>& forward) {
                             return with_autocast(forward);
                           }});
  const double limit = config_.optimizer.clip_norm;  // 0 means no limit
  // The device has computed the loss when it has computed the norm, so only this call waits for it.
  const double gradient_norm =
      strategy_->clip_gradients(limit > 0 ? limit : std::numeric_limits<double>::infinity());
  const StepSums sums = sum_over_ranks(loss.value(context_.system), batch.data.size(0));
  if (sums.data_have_changed) check_data();
  if (!std::isfinite(sums.loss) || !std::isfinite(gradient_norm)) {
    throw CommonError(
        Error(ErrorCode::kInvalidArgument,
              cadre::format("step {}: the loss is {} and the gradients' norm {}; lower "
                            "optimizer.learning_rate or optimizer.clip_norm, and resume with "
                            "run.resume=auto",
                            step_ + 1, sums.loss, gradient_norm)));
  }
  const double learning_rate =
      learning_rate_at(step_ + 1, config_.run.steps, config_.optimizer, config_.schedule);
  strategy_->step(learning_rate);
  strategy_->optimizer().zero_grad();
  ++step_;
  loader_at_step_ = loader_->position();
  report(sums.loss, gradient_norm, started, communicated);
  return sums;
}

// Runs the forward under autocast and converts the output to float32, in which the loss is
// computed.
at::Tensor Trainer::with_autocast(const std::function<at::Tensor()>& forward) const {
  const Autocast autocast(config_.run.autocast == "bfloat16" ? at::kBFloat16 : at::kFloat);
  return forward().to(at::kFloat);
}

at::Tensor Trainer::infer(const at::Tensor& data) {
  const at::Tensor on_device = data.to(context_.device, /*non_blocking=*/true);
  return with_autocast([&] { return strategy_->infer(on_device); });
}

Batch Trainer::on_device(const Batch& batch) const {
  return {.data = batch.data.to(context_.device, /*non_blocking=*/true),
          .target = batch.target.to(context_.device, /*non_blocking=*/true)};
}

Trainer::StepSums Trainer::sum_over_ranks(double mean_loss, int64_t num_samples) {
  const auto count = static_cast<double>(num_samples);
  const bool is_preempted = context_.is_preempted && context_.is_preempted();
  const at::Tensor sums =
      torch::tensor({mean_loss * count, count, context_.stop_is_requested() ? 1.0 : 0.0,
                     task_->data_are_unchanged() ? 0.0 : 1.0, is_preempted ? 1.0 : 0.0},
                    torch::kFloat64);
  context_.world.all_reduce(sums);
  const auto* values = sums.const_data_ptr<double>();
  return {.loss = values[0] / values[1],
          .stop = values[2] > 0 || values[4] > 0,
          .data_have_changed = values[3] > 0,
          .is_preempted = values[4] > 0};
}

// Ends the run on all ranks if one of them has read data that differ from those whose digests were
// compared at the start.
void Trainer::check_data() {
  on_all_ranks(context_.world, [this] { task_->check_data(); });
}

// Returns the groups along the axes of the mesh on which the model is divided, or has replicas of
// shards.
std::vector<ProcessGroup> Trainer::groups_of_axes() const {
  std::vector<ProcessGroup> groups;
  const std::optional<DeviceMesh>& mesh = layout_->mesh ? layout_->mesh : layout_->replicas;
  if (!mesh) return groups;
  for (const MeshAxis& axis : mesh->axes()) {
    if (axis.size > 1) groups.push_back(mesh->group(axis.name));
  }
  return groups;
}

// Returns the time that operations have taken: those of the world, of the groups along the axes of
// its mesh, and of the group in which routers exchange their token counts.
Duration Trainer::time_in_communication() const {
  Duration sum = context_.time_in_communication();
  std::vector<const Communicator*> counted = {&context_.world.communicator()};
  const auto add = [&](const ProcessGroup& group) {
    const Communicator& communicator = group.communicator();
    if (std::ranges::find(counted, &communicator) != counted.end()) return;
    counted.push_back(&communicator);
    sum += communicator.time_in_operations();
  };
  for (const ProcessGroup& group : groups_of_axes()) add(group);
  if (layout_->mesh && config_.model.experts > 0) {
    add(layout_->mesh->joint_group(token_axes(config_.parallel)));
  }
  return sum;
}

void Trainer::report(double loss, double gradient_norm, TimePoint started, Duration communicated) {
  if (!progress_) return;
  const TimePoint now = context_.system.now();
  const double elapsed = seconds(now - started);
  const double per_step = seconds(now - run_started_) / static_cast<double>(step_ - first_step_);
  progress_->report(StepReport{
      .step = step_,
      .num_steps = config_.run.steps,
      .loss = loss,
      .learning_rate =
          learning_rate_at(step_, config_.run.steps, config_.optimizer, config_.schedule),
      .gradient_norm = gradient_norm,
      .items_per_second =
          static_cast<double>(config_.run.global_batch_size * task_->items_per_sample()) / elapsed,
      .item_name = task_->item_name(),
      .communication_share =
          communication_share(time_in_communication() - communicated, now - started),
      .memory_bytes = resident_memory_bytes(),
      .seconds_left = per_step * static_cast<double>(config_.run.steps - step_)});
}

void Trainer::evaluate() {
  strategy_->set_training(false);
  result_.held_out = train::evaluate([this](const at::Tensor& data) { return infer(data); }, *task_,
                                     *held_out_loader_, context_.world, context_.system);
  strategy_->set_training(true);
  check_data();
  if (progress_) progress_->report(EvaluationReport{.step = step_, .held_out = result_.held_out});
  if (!config_.run.keep_best) return;
  finish_snapshot();  // it may turn out to be the best one so far
  const double loss = result_.held_out.loss;
  if (!std::isfinite(loss) || (best_held_out_loss_ && loss >= *best_held_out_loss_)) return;
  // The loss is equal on all ranks, so they all take this branch and save.
  loss_before_best_ = std::exchange(best_held_out_loss_, loss);
  best_step_ = step_;
  begin_snapshot();
}

// Does nothing if this step has a snapshot already. But if an evaluation since then has found this
// step's loss to be the best, the snapshot is marked as the best, or written again with that loss.
void Trainer::begin_snapshot() {
  if (snapshot_writer_->is_under_way(step_)) return;
  finish_snapshot();
  const bool is_current = saved_best_loss_ == best_held_out_loss_ || step_ == first_step_;
  if (saved_step_ == step_ && is_current) {
    if (best_step_ == step_) mark_best();
    return;
  }
  snapshot_writer_->begin(state(), model_.get());
  if (!snapshot_writer_->writes_in_background()) finish_snapshot();
}

void Trainer::finish_snapshot() {
  const std::optional<SnapshotWriter::Outcome> outcome = snapshot_writer_->finish();
  if (!outcome) return;
  const bool is_best = best_step_ == outcome->step;
  if (outcome->status.ok()) {
    saved_step_ = outcome->step;
    saved_best_loss_ = best_held_out_loss_;  // not changed since the snapshot was begun
    if (is_best) mark_best();
    return;
  }
  snapshot_failure_ = outcome->status.error();
  print_line(
      cadre::format("warning: {}; earlier snapshots are untouched", snapshot_failure_->message()));
  // The snapshot failed, so it cannot count as the best.
  if (is_best) best_held_out_loss_ = loss_before_best_;
}

// Completes the snapshot that was being written when the run failed, so that the run can be resumed
// from it. If the group has failed, writing fails, too.
void Trainer::finish_snapshot_of_failed_run() noexcept {
  try {
    finish_snapshot();
  } catch (...) {  // the run ends with its first error
  }
}

// Marks the snapshot that was saved last.
void Trainer::mark_best() {
  best_step_ = -1;
  if (!is_first_rank()) return;
  try {
    snapshots_.mark_best(saved_step_);
  } catch (const Error& error) {
    print_line(cadre::format("warning: {}", error.message()));
  }
}

TrainState Trainer::state() {
  TrainState state = {.step = step_,
                      .loader = loader_->position(),
                      .data = task_->data_identity(),
                      .best_held_out_loss = best_held_out_loss_,
                      .generators = generators_of_all_ranks(context_.world, at::kCPU),
                      .config = config_text(config_)};
  if (!context_.device.is_cpu()) {
    state.device_type = type_name(context_.device);
    state.device_generators = generators_of_all_ranks(context_.world, context_.device);
  }
  if (const auto layout = strategy_->learned_layout()) state.bucket_layout = layout->to_string();
  return state;
}

std::optional<int64_t> Trainer::step_in_memory() const {
  const bool is_whole = strategy_ && model_ && !strategy_->holds_parts();
  return is_whole ? std::optional(step_) : std::nullopt;
}

void Trainer::save_state_in_memory() {
  if (snapshots_.latest_step() == step_) return;
  TrainState state = {.step = step_,
                      .loader = loader_at_step_,
                      .data = task_->data_identity(),
                      .best_held_out_loss = best_held_out_loss_,
                      .generators = {},
                      .config = config_text(config_)};
  if (!context_.device.is_cpu()) state.device_type = type_name(context_.device);
  if (const auto layout = strategy_->learned_layout()) state.bucket_layout = layout->to_string();
  snapshots_.save(step_, [&](const std::string& folder) {
    const std::vector<ParameterState> states = state_dict(
        strategy_->local_optimizer(), strategy_->parts().parameters, {.is_shared = true});
    write_train_state(folder, state, *model_, states).value_or_throw();
  });
}

// Saves the model before anything else that may fail.
void Trainer::finish() {
  result_.steps = step_;
  begin_snapshot();
  finish_snapshot();
  if (!result_.was_stopped) show_result();
  finish_snapshot();
  if (saved_step_ != step_) {
    throw CommonError(unsaved_end({.step = step_,
                                   .saved_step = saved_step_,
                                   .run_folder = run_path_,
                                   .cause = snapshot_failure_.value()}));
  }
  snapshot_writer_->close();
  if (result_.was_stopped) {
    print_line(
        cadre::format("stopped after step {} on request; resume with run.resume=auto", step_));
  }
}

void Trainer::show_result() {
  evaluate();
  const std::string sample = sample_of_model();
  if (!sample.empty()) {
    print_line("a sample:");
    print_line(sample);
  }
  const std::string summary = strategy_->summary(context_.world);
  if (!summary.empty()) print_line(summary);
  report_memory_of_device();
  if (progress_) progress_->plot(config_.run.name, run_path_ + "/loss.svg");
}

// Generates the sample text. If the model is sharded or divided, every forward needs all ranks:
// then all of them generate the same text or fail in the same way.
std::string Trainer::sample_of_model() {
  if (!is_first_rank() && strategy_->has_whole_model()) return "";
  strategy_->set_training(false);
  std::string sample;
  try {
    sample = task_->sample([this](const at::Tensor& data) { return infer(data); });
  } catch (...) {
    const Error error = caught_error();
    if (is_group_failure(error)) throw;
    print_line(cadre::format("warning: no text was generated: {}", error.message()));
  }
  strategy_->set_training(true);
  return sample;
}

// What the allocator has reserved and tensors do not use is fragmented, or was used before.
void Trainer::report_memory_of_device() {
  if (context_.device.is_cpu()) return;
  const device::DeviceMemory memory =
      device::find_devices(context_.device.type()).runtime.value().memory(context_.device);
  print_line(cadre::format(
      "memory of {}: at most {} MB in tensors, at most {} MB reserved for them",
      context_.device.str(), memory.peak_allocated_bytes >> 20, memory.peak_reserved_bytes >> 20));
}

void Trainer::print_line(const std::string& line) {
  if (progress_) progress_->print_line(line);
}

}  // namespace cadre::train
