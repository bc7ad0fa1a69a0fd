#include "cadre/train/trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/checkpoint/module_file.h"
#include "cadre/train/common_error.h"
#include "cadre/train/config/config_file.h"
#include "cadre/train/models/model.h"
#include "cadre/train/resume_check.h"
#include "cadre/train/schedule.h"
#include "cadre/train/tasks/run_setup.h"
#include "cadre/wrap/autocast.h"

namespace cadre::train {
namespace {

double seconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

std::optional<BucketLayout> parse_layout(const std::string& bucket_layout) {
  if (bucket_layout.empty()) return std::nullopt;
  return BucketLayout::parse(bucket_layout).value_or_throw();
}

std::vector<std::string> compare_configs(const std::string& before, const Config& now) {
  std::optional<Config> parsed;
  try {
    parsed = parse_config(before, "the snapshot's configuration");
  } catch (const Error& error) {
    return {cadre::format("warning: {}; what has changed since is not known", error.message())};
  }
  return check_resumed_config(*parsed, now);
}

void restore_generator(const at::Tensor& state, const std::string& snapshot) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  if (state.numel() != generator.get_state().numel()) {
    throw Error(ErrorCode::kCorruption,
                cadre::format("{}/state.json: a generator's state has {} bytes instead of {}",
                              snapshot, state.numel(), generator.get_state().numel()));
  }
  generator.set_state(state);
}

bool is_whole(const std::string& snapshot) {
  try {
    (void)read_train_state(snapshot);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// What to do when `snapshot` cannot be read.
std::string remedy_for(const std::string& snapshot) {
  const SnapshotFolder run(std::filesystem::path(snapshot).parent_path().string());
  std::vector<int64_t> steps = run.steps();
  std::ranges::reverse(steps);
  for (const int64_t step : steps) {
    const std::string other = run.path_of(step);
    if (other != snapshot && is_whole(other)) {
      return cadre::format("another snapshot is whole: run.resume={}", other);
    }
  }
  return "no other snapshot is whole: start anew with run.resume=none";
}

// REQUIRES: in a handler of `error`, which reading the snapshot has thrown.
[[noreturn]] void throw_with_remedy(const Error& error, const std::string& snapshot) {
  // Otherwise it is whole, but does not fit what is asked for.
  const bool is_damaged =
      error.code() == ErrorCode::kCorruption || error.code() == ErrorCode::kUnavailable;
  if (!is_damaged) throw error;
  throw Error(error.code(), cadre::format("{}; {}", error.message(), remedy_for(snapshot)));
}

}  // namespace

Trainer::Trainer(const Config& config, Surroundings surroundings)
    : config_(config),
      surroundings_(std::move(surroundings)),
      run_path_(config.run.folder + "/" + config.run.name),
      snapshots_(run_path_) {
  at::set_num_threads(static_cast<int>(config.run.threads));
  if (!surroundings_.replicas) surroundings_.replicas = make_replica_group(surroundings_.world);
  Start start;
  on_all_ranks(*surroundings_.replicas, [&] { start = prepare(); });
  strategy_ = make_strategy(config_.parallel, model_,
                            {.world = surroundings_.world, .replicas = surroundings_.replicas},
                            start.layout);
  on_all_ranks(*surroundings_.replicas, [&] {
    optimizer_ = make_optimizer(strategy_->trained(), config_.optimizer);
    if (start.snapshot) restore_optimizer(*start.snapshot);
    if (is_first_rank()) open_run_folder(start.snapshot);
  });
  for (const std::string& remark : start.remarks) say(remark);
  introduce();
}

Trainer::~Trainer() = default;

Trainer::Start Trainer::prepare() {
  check_strategy(config_.parallel, surroundings_.world.world_size());
  task_ = open_task(config_, surroundings_.system.deadline_in(kTextSourceTimeout));
  const ReplicaGroup& replicas = *surroundings_.replicas;
  loader_ = make_training_loader(config_, *task_, replicas.rank(), replicas.world_size());
  resolve_epochs(config_, *loader_);
  model_ = make_initial_model(config_, *task_);
  const std::optional<std::string> snapshot = find_snapshot(config_.run, snapshots_);
  if (snapshot) return resume_from(*snapshot);
  return {};
}

void Trainer::open_run_folder(const std::optional<std::string>& snapshot) {
  run_folder_ = std::make_unique<RunFolder>(run_path_, snapshot);
  progress_ =
      std::make_unique<Progress>(ProgressOptions{.print = surroundings_.print,
                                                 .is_terminal = surroundings_.is_terminal,
                                                 .metrics_path = run_path_ + "/metrics.jsonl",
                                                 .keep_metrics_until_step = first_step_});
  const std::string& moved_to = run_folder_->moved_to();
  if (!moved_to.empty())
    say(cadre::format("an earlier run of this name was moved to {}", moved_to));
  if (snapshot) say(cadre::format("going on from {}", *snapshot));
}

void Trainer::introduce() {
  const RunConfig& run = config_.run;
  const bool is_text = task_->items_per_sample() > 1;
  say(cadre::format("{} of {} parameters on {}; {} steps of {} samples{}", config_.model.kind,
                    num_parameters(*model_), task_->data_text(), run.steps, run.batch_size,
                    is_text ? cadre::format(" of {} tokens", config_.model.context) : ""));
  if (step_ >= run.steps) {
    say(
        cadre::format("run.steps is {}, and the snapshot is of step {}: no step is left to do; a "
                      "larger run.steps goes on",
                      run.steps, step_));
  }
}

Trainer::Start Trainer::resume_from(const std::string& snapshot) {
  try {
    return restore(snapshot);
  } catch (const Error& error) {
    throw_with_remedy(error, snapshot);
  }
}

Trainer::Start Trainer::restore(const std::string& snapshot) {
  const TrainState state = read_train_state(snapshot);
  const DataIdentity data = task_->data_identity();
  if (state.data != data) {
    const std::string difference =
        state.data.size == data.size
            ? cadre::format("as many {}, but others", task_->item_name())
            : cadre::format("{} {} then, {} now", state.data.size, task_->item_name(), data.size);
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("{} was trained on other data: {}; restore the data, or start anew "
                              "with run.resume=none",
                              snapshot, difference));
  }
  std::vector<std::string> remarks = compare_configs(state.config, config_);
  if (state.format < kFirstFormatWithDigests) {
    remarks.push_back(
        cadre::format("warning: {} has format {}, which has no digests: damage to its "
                      "files cannot be found",
                      snapshot, state.format));
  }
  load(*model_, cadre::format("{}/{}", snapshot, kModelFile));
  loader_->seek(state.loader);
  first_step_ = step_ = snapshot_step_ = state.step;
  best_held_out_loss_ = state.best_held_out_loss;
  const auto rank = static_cast<size_t>(surroundings_.replicas->rank().value);
  // With another number of ranks there is no generator to restore for some; they keep their own.
  if (rank < state.generators.size()) restore_generator(state.generators[rank], snapshot);
  return {.snapshot = snapshot,
          .layout = parse_layout(state.bucket_layout),
          .remarks = std::move(remarks)};
}

void Trainer::restore_optimizer(const std::string& snapshot) {
  try {
    const SafetensorsFile file =
        SafetensorsFile::open(cadre::format("{}/{}", snapshot, kOptimizerFile));
    optimizer_->load_state(strategy_->part_of_state(file.read_all()));
  } catch (const Error& error) {
    throw_with_remedy(error, snapshot);
  }
}

TrainResult Trainer::run() {
  run_started_ = surroundings_.system.now();
  while (step_ < config_.run.steps && !result_.was_stopped) {
    for (const Batch& batch : loader_->epoch(loader_->position().epoch)) {
      const StepSums sums = step(batch);
      result_.loss = sums.loss;
      result_.was_stopped = sums.stop && step_ < config_.run.steps;
      if (result_.was_stopped || step_ == config_.run.steps) break;
      if (config_.run.evaluate_every > 0 && step_ % config_.run.evaluate_every == 0) evaluate();
      if (config_.run.snapshot_every > 0 && step_ % config_.run.snapshot_every == 0) {
        save_snapshot();
      }
    }
    // The epoch may have ended by the last step, too; then the position is not used any more.
    if (!result_.was_stopped && step_ < config_.run.steps) {
      loader_->seek({.epoch = loader_->position().epoch + 1, .samples = 0});
    }
  }
  finish();
  return result_;
}

Trainer::StepSums Trainer::step(const Batch& batch) {
  const TimePoint started = surroundings_.system.now();
  const Duration communicated = surroundings_.time_in_communication();
  const double loss = backward_in_parts(
      *strategy_, *task_, batch, config_.run.accumulate,
      [this](const at::Tensor& data, int64_t num_samples) {
        return with_autocast([&] { return strategy_->forward(data, num_samples); });
      });
  const StepSums sums = sum_over_ranks(loss, batch.data.size(0));
  const double limit = config_.optimizer.clip_norm;  // 0: none
  const double gradient_norm =
      strategy_->clip_gradients(limit > 0 ? limit : std::numeric_limits<double>::infinity());
  if (!std::isfinite(sums.loss) || !std::isfinite(gradient_norm)) {
    throw CommonError(
        Error(ErrorCode::kInvalidArgument,
              cadre::format("step {}: the loss is {} and the gradients' norm {}; lower "
                            "optimizer.learning_rate or optimizer.clip_norm, and go on with "
                            "run.resume=auto",
                            step_ + 1, sums.loss, gradient_norm)));
  }
  const double learning_rate =
      learning_rate_at(step_ + 1, config_.run.steps, config_.optimizer, config_.schedule);
  strategy_->update([&] { optimizer_->step(learning_rate); });
  optimizer_->zero_grad();
  ++step_;
  report(sums.loss, gradient_norm, started, communicated);
  return sums;
}

// What a loss is computed from is float32 in any case.
at::Tensor Trainer::with_autocast(const std::function<at::Tensor()>& forward) const {
  const Autocast autocast(config_.run.autocast == "bfloat16" ? at::kBFloat16 : at::kFloat);
  return forward().to(at::kFloat);
}

at::Tensor Trainer::infer(const at::Tensor& data) {
  return with_autocast([&] { return strategy_->infer(data); });
}

Trainer::StepSums Trainer::sum_over_ranks(double mean_loss, int64_t num_samples) {
  const auto count = static_cast<double>(num_samples);
  const at::Tensor sums = torch::tensor(
      {mean_loss * count, count, surroundings_.stop_is_requested() ? 1.0 : 0.0}, torch::kFloat64);
  surroundings_.replicas->all_reduce(sums, ReduceOp::kSum);
  const auto* values = sums.const_data_ptr<double>();
  return {.loss = values[0] / values[1], .stop = values[2] > 0};
}

void Trainer::report(double loss, double gradient_norm, TimePoint started, Duration communicated) {
  if (!progress_) return;
  const TimePoint now = surroundings_.system.now();
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
          static_cast<double>(config_.run.batch_size * task_->items_per_sample()) / elapsed,
      .item_name = task_->item_name(),
      .communication_share =
          seconds(surroundings_.time_in_communication() - communicated) / elapsed,
      .memory_bytes = resident_memory_bytes(),
      .seconds_left = per_step * static_cast<double>(config_.run.steps - step_)});
}

void Trainer::evaluate() {
  model_->eval();
  result_.held_out = train::evaluate([this](const at::Tensor& data) { return infer(data); }, *task_,
                                     *surroundings_.replicas);
  model_->train();
  if (progress_) progress_->report(EvaluationReport{.step = step_, .held_out = result_.held_out});
  const double loss = result_.held_out.loss;
  if (!config_.run.keep_best || (best_held_out_loss_ && loss >= *best_held_out_loss_)) return;
  // The same on all ranks, so all of them save. A best one that was not kept is none.
  const std::optional<double> previous = std::exchange(best_held_out_loss_, loss);
  if (!save_snapshot()) {
    best_held_out_loss_ = previous;
    return;
  }
  if (!is_first_rank()) return;
  const Status status = snapshots_.mark_best(step_);
  if (!status.ok()) say(cadre::format("warning: {}", status.error().message()));
}

bool Trainer::save_snapshot() {
  if (snapshot_step_ == step_) return true;
  const TrainState state = this->state();
  const NamedTensors optimizer_state = strategy_->whole_state(optimizer_->state());
  Status status;
  strategy_->with_whole_model([&] {
    if (!is_first_rank()) return;
    status = snapshots_.save(step_, [&](const std::string& folder) {
      return write_train_state(folder, state, *model_, optimizer_state);
    });
  });
  if (!status.ok()) {
    say(cadre::format("warning: {}; earlier snapshots are untouched", status.error().message()));
  }
  const at::Tensor is_saved = torch::tensor({status.ok() ? 1.0 : 0.0}, torch::kFloat64);
  surroundings_.replicas->all_reduce(is_saved, ReduceOp::kMin);
  if (is_saved.item<double>() == 0) return false;
  snapshot_step_ = step_;
  return true;
}

TrainState Trainer::state() {
  TrainState state = {.step = step_,
                      .loader = loader_->position(),
                      .data = task_->data_identity(),
                      .best_held_out_loss = best_held_out_loss_,
                      .generators = generators_of_all_ranks(),
                      .config = config_text(config_)};
  if (const auto layout = strategy_->learned_layout()) state.bucket_layout = layout->to_string();
  return state;
}

std::vector<at::Tensor> Trainer::generators_of_all_ranks() {
  const at::Tensor own = at::detail::getDefaultCPUGenerator().get_state();
  const int world_size = surroundings_.replicas->world_size();
  const at::Tensor all = torch::empty({world_size * own.numel()}, torch::kByte);
  surroundings_.replicas->all_gather(all, own);
  return all.view({world_size, own.numel()}).unbind();
}

void Trainer::finish() {
  result_.steps = step_;
  if (result_.was_stopped) {
    if (!save_snapshot()) refuse_unsaved_end();
    say(cadre::format("stopped after step {} as asked; go on with run.resume=auto", step_));
    return;
  }
  evaluate();
  const bool is_saved = save_snapshot();
  const std::string sample = sample_of_model();
  if (!sample.empty()) {
    say("a sample:");
    say(sample);
  }
  if (!is_saved) refuse_unsaved_end();
}

// All ranks write the same text where each forward needs all of them.
std::string Trainer::sample_of_model() {
  if (!is_first_rank() && strategy_->has_whole_model()) return "";
  model_->eval();
  const std::string sample = task_->sample([this](const at::Tensor& data) { return infer(data); });
  model_->train();
  return sample;
}

void Trainer::refuse_unsaved_end() const {
  std::string text = cadre::format("the run ended at step {}, ", step_);
  if (snapshot_step_ < 0) {
    text += cadre::format(
        "but no snapshot could be written, so nothing of it is kept: make room in {}, or choose "
        "another run.folder, and start it again",
        run_path_);
  } else {
    text += cadre::format(
        "whose snapshot could not be written; the last one is of step {}: make room in {} and go "
        "on with run.resume=auto",
        snapshot_step_, run_path_);
  }
  throw CommonError(Error(ErrorCode::kUnavailable, text));
}

void Trainer::say(const std::string& line) {
  if (progress_) progress_->say(line);
}

}  // namespace cadre::train
