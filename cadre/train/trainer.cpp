#include "cadre/train/trainer.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <filesystem>

#include "cadre/base/format.h"
#include "cadre/train/config/config_file.h"
#include "cadre/train/run_folder.h"
#include "cadre/train/schedule.h"
#include "cadre/train/text_sample.h"
#include "cadre/train/text_source.h"

namespace cadre::train {
namespace {

constexpr Duration kTextSourceTimeout = std::chrono::seconds(30);

NamedTensors named_parameters(const torch::nn::Module& module) {
  NamedTensors parameters;
  for (const auto& item : module.named_parameters()) {
    parameters.emplace_back(item.key(), item.value());
  }
  return parameters;
}

double seconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

DistributedDataParallelOptions replication_options(const std::string& bucket_layout) {
  DistributedDataParallelOptions options = {.weighting = GradientWeighting::kSamples};
  if (!bucket_layout.empty()) options.layout = BucketLayout::parse(bucket_layout).value_or_throw();
  return options;
}

}  // namespace

Trainer::Trainer(const Config& config, Surroundings surroundings)
    : config_(config),
      surroundings_(std::move(surroundings)),
      run_folder_(config.run.folder + "/" + config.run.name),
      snapshots_(run_folder_) {
  at::set_num_threads(static_cast<int>(config.run.threads));
  const RunConfig& run = config_.run;
  ReplicaGroup& replicas = *surroundings_.replicas;
  corpus_ = std::make_shared<const TextCorpus>(
      open_text(config_.data, surroundings_.system.deadline_in(kTextSourceTimeout)));
  const TextSplit split = split_by_position(*corpus_, config_.data.held_out);
  const int64_t context = config_.model.context;
  loader_ = std::make_unique<DataLoader>(
      std::make_shared<const TextDataset>(corpus_, split.train, context),
      DataLoaderOptions{.batch_size = run.batch_size,
                        .rank = replicas.rank(),
                        .world_size = replicas.world_size(),
                        .seed = run.seed,
                        .drop_last = true});
  held_out_ = std::make_unique<HeldOut>(corpus_, split.held_out, context, run.evaluate_tokens);
  model_ = make_language_model(config_.model, kVocabularySize, static_cast<uint64_t>(run.seed));
  optimizer_ = make_optimizer(named_parameters(*model_), config_.optimizer);

  const std::optional<std::string> snapshot = find_snapshot(run, snapshots_);
  if (snapshot) {
    resume_from(*snapshot);
  } else {
    replicated_ = std::make_unique<DistributedDataParallel<LanguageModel>>(
        model_, surroundings_.replicas, replication_options(""));
  }
  if (!is_first_rank()) return;
  const std::string moved = prepare_run_folder(run_folder_, {.keep = snapshot.has_value()});
  progress_ =
      std::make_unique<Progress>(ProgressOptions{.print = surroundings_.print,
                                                 .is_terminal = surroundings_.is_terminal,
                                                 .metrics_path = run_folder_ + "/metrics.jsonl",
                                                 .keep_metrics_until_step = first_step_});
  if (!moved.empty()) say(cadre::format("an earlier run of this name was moved to {}", moved));
  if (snapshot) say(cadre::format("going on from {}", *snapshot));
  say(cadre::format(
      "{} of {} parameters on {} tokens of {} files; {} steps of {} samples of {} tokens",
      config_.model.kind, num_parameters(*model_), split.train.size(), corpus_->num_files(),
      run.steps, run.batch_size, context));
}

void Trainer::resume_from(const std::string& snapshot) {
  const TrainState state = read_train_state(snapshot);
  if (state.num_tokens != corpus_->num_tokens() ||
      state.text_fingerprint != corpus_->fingerprint()) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("{} was trained on another text: {} tokens then, {} now; restore the "
                              "text, or start anew with run.resume=none",
                              snapshot, state.num_tokens, corpus_->num_tokens()));
  }
  read_tensors(snapshot, *model_, *optimizer_);
  loader_->seek(state.loader);
  first_step_ = step_ = snapshot_step_ = state.step;
  const auto rank = static_cast<size_t>(surroundings_.replicas->rank().value);
  // With another number of ranks there is no generator to restore for some; they keep their own.
  if (rank < state.generators.size()) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    generator.set_state(state.generators[rank]);
  }
  replicated_ = std::make_unique<DistributedDataParallel<LanguageModel>>(
      model_, surroundings_.replicas, replication_options(state.bucket_layout));
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
  const int64_t num_samples = batch.data.size(0);
  replicated_->set_num_samples(num_samples);
  const at::Tensor loss = next_token_loss(replicated_->forward(batch.data), batch.target);
  loss.backward();
  const StepSums sums = sum_over_ranks(loss.item<double>(), num_samples);
  const double gradient_norm =
      clip_gradient_norm(optimizer_->parameters(), config_.optimizer.clip_norm);
  if (!std::isfinite(sums.loss) || !std::isfinite(gradient_norm)) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("step {}: the loss is {} and the gradients' norm {}; lower "
                              "optimizer.learning_rate or optimizer.clip_norm, and go on with "
                              "run.resume=auto",
                              step_ + 1, sums.loss, gradient_norm));
  }
  optimizer_->step(
      learning_rate_at(step_ + 1, config_.run.steps, config_.optimizer, config_.schedule));
  optimizer_->zero_grad();
  ++step_;
  report(sums.loss, gradient_norm, started, communicated);
  return sums;
}

Trainer::StepSums Trainer::sum_over_ranks(double mean_loss, int64_t num_samples) {
  const auto count = static_cast<double>(num_samples);
  const at::Tensor sums = torch::tensor(
      {mean_loss * count, count, surroundings_.stop_is_requested() ? 1.0 : 0.0}, torch::kFloat64);
  surroundings_.replicas->all_reduce_async(sums, ReduceOp::kSum)();
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
      .tokens_per_second = static_cast<double>(tokens_per_step()) / elapsed,
      .communication_share =
          seconds(surroundings_.time_in_communication() - communicated) / elapsed,
      .memory_bytes = resident_memory_bytes(),
      .seconds_left = per_step * static_cast<double>(config_.run.steps - step_)});
}

void Trainer::evaluate() {
  result_.held_out_loss = held_out_->evaluate(*model_, *surroundings_.replicas);
  result_.bigram_entropy = held_out_->bigram_entropy();
  if (progress_) {
    progress_->report(EvaluationReport{.step = step_,
                                       .held_out_loss = result_.held_out_loss,
                                       .bigram_entropy = result_.bigram_entropy});
  }
}

void Trainer::save_snapshot() {
  if (snapshot_step_ == step_) return;
  TrainState state = {.step = step_,
                      .loader = loader_->position(),
                      .num_tokens = corpus_->num_tokens(),
                      .text_fingerprint = corpus_->fingerprint(),
                      .generators = generators_of_all_ranks(),
                      .config = config_text(config_)};
  if (const auto layout = replicated_->learned_layout()) state.bucket_layout = layout->to_string();
  snapshot_step_ = step_;
  if (!is_first_rank()) return;
  const Status status = snapshots_.save(step_, [&](const std::string& folder) {
    return write_train_state(folder, state, *model_, *optimizer_);
  });
  if (!status.ok()) {
    say(cadre::format("warning: {}; earlier snapshots are untouched, and training goes on",
                      status.error().message()));
  }
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
    save_snapshot();
    say(cadre::format("stopped after step {} as asked; go on with run.resume=auto", step_));
    return;
  }
  evaluate();
  save_snapshot();
  if (!is_first_rank() || config_.sample.tokens == 0) return;
  say("a sample:");
  say(sample_text(*model_, config_.sample, static_cast<uint64_t>(config_.run.seed)));
}

void Trainer::say(const std::string& line) {
  if (progress_) progress_->say(line);
}

}  // namespace cadre::train
