#include "cadre/train/trainer/run/run_setup.h"

#include <torch/version.h>

#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/deferred/deferred_init.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/trainer/config/schedule.h"
#include "cadre/train/trainer/tasks/text_source.h"

namespace cadre::train {

std::unique_ptr<Task> open_task(const Config& config, Deadline deadline) {
  const std::string& path = config.data.path;
  const bool is_path = config.data.kind != "synthetic" && path != kPythonStdlib;
  std::error_code failure;
  if (is_path && !std::filesystem::exists(path, failure)) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("data.path: there is no file or folder {}", path));
  }
  try {
    return make_task(config, deadline);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kUnavailable) throw error.with_context("data.path");
    throw;
  }
}

void check_global_batch_size(const Config& config, const Task& task, int num_shares) {
  const int64_t size = config.run.global_batch_size;
  if (size < num_shares) {
    throw Error(
        ErrorCode::kInvalidArgument,
        config.parallel.divides_model()
            ? cadre::format("run.global_batch_size is {}, but the processes form {} groups with "
                            "different samples, each of which needs at least one in every step",
                            size, num_shares)
            : cadre::format("run.global_batch_size is {}, the samples of all {} processes "
                            "together: each process needs at least one sample in every step",
                            size, num_shares));
  }
  const int64_t num_samples = task.training_data()->size();
  if (num_samples < size) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("run.global_batch_size is {}, but the training data have only {} "
                              "samples without those of data.held_out: lower "
                              "run.global_batch_size, or provide more data",
                              size, num_samples));
  }
}

std::vector<AgreedField> agreed_inputs(const Task& task,
                                       const std::optional<InitialWeights>& weights) {
  const DataIdentity data = task.data_identity();
  return {
      {cadre::format("the number of {} of the data", task.item_name()), std::to_string(data.size)},
      {"the digest of the data", cadre::format("{:016x}", data.fingerprint)},
      {"the digest of model.weights", weights ? weights->digest() : std::string("none")},
      {"the version of libtorch", TORCH_VERSION}};
}

std::unique_ptr<DataLoader> make_training_loader(const Config& config, const Task& task,
                                                 const std::optional<ProcessGroup>& group,
                                                 bool is_pinned) {
  // If the experts have a capacity, the last tokens of a batch may be dropped, so the order of its
  // samples matters.
  const bool has_capacity = config.model.experts > 0 && config.model.capacity_factor > 0;
  return std::make_unique<DataLoader>(
      task.training_data(),
      DataLoaderOptions{.batch_size = config.run.global_batch_size,
                        .ranks = group,
                        .seed = config.run.seed,
                        .drop_last = true,
                        .split = has_capacity ? BatchSplit::kConsecutive : BatchSplit::kInTurn,
                        .num_threads = static_cast<int>(config.data.threads),
                        .pin_memory = is_pinned});
}

SampledRows rows_of_rank(const DataLoader& loader, int64_t step, const DataRanks& ranks) {
  if (loader.split() == BatchSplit::kConsecutive) {
    return {.step = step, .first = loader.batch_size() * ranks.rank / ranks.size, .stride = 1};
  }
  const int64_t begin = loader.position().samples - loader.batch_size();
  return {.step = step,
          .first = (ranks.rank + ranks.size - begin % ranks.size) % ranks.size,
          .stride = ranks.size};
}

void resolve_epochs(Config& config, const Task& task) {
  // A last batch that would have fewer samples is skipped.
  const int64_t steps_per_epoch = task.training_data()->size() / config.run.global_batch_size;
  if (config.run.epochs > 0) config.run.steps = config.run.epochs * steps_per_epoch;
  if (config.schedule.step_size == 0) config.schedule.step_size = steps_per_epoch;
  config.schedule.warmup_steps = resolved_warmup_steps(config.schedule, config.run.steps);
  if (config.schedule.warmup_steps > config.run.steps) {
    throw Error(
        ErrorCode::kInvalidArgument,
        cadre::format("schedule.warmup_steps is {}, more than the {} steps of run.epochs={}: set "
                      "schedule.warmup_steps=-1, which is a tenth of the steps",
                      config.schedule.warmup_steps, config.run.steps, config.run.epochs));
  }
}

std::shared_ptr<Model> make_initial_model(const Config& config, const Task& task) {
  std::shared_ptr<Model> model = task.make_model();
  if (!config.model.weights.empty()) load_weights(*model, config.model.weights);
  return model;
}

std::shared_ptr<Model> make_deferred_model(const Task& task) {
  return defer_init([&task] { return task.make_model(); });
}

bool load_initial_weights(const Config& config, const SnapshotParts& parts,
                          const ProcessGroup& world) {
  if (config.model.weights.empty()) return false;
  load_sharded(weights_source(config.model.weights), parts, world, {.with_optimizer = false});
  return true;
}

}  // namespace cadre::train
