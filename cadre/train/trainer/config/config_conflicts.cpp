#include <array>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/train/trainer/config/config_fields.h"

namespace cadre::train {
namespace {

// A logit that is divided by a smaller temperature may be infinite in float32.
constexpr double kMinTemperature = 1e-30;

std::optional<ConfigConflict> find_expert_conflict(const Config& config) {
  const ModelConfig& model = config.model;
  if (model.experts == 0) return std::nullopt;
  if (model.kind != "gpt") {
    return ConfigConflict{"model.experts",
                          cadre::format("is {}, but only the gpt has experts, and model.kind is "
                                        "{}: choose 0",
                                        model.experts, model.kind)};
  }
  if (model.experts_per_token > model.experts) {
    return ConfigConflict{"model.experts_per_token",
                          cadre::format("is {}, more than the {} experts of model.experts",
                                        model.experts_per_token, model.experts)};
  }
  return std::nullopt;
}

std::optional<ConfigConflict> find_model_conflict(const Config& config) {
  const ModelConfig& model = config.model;
  const bool is_text = config.data.kind == "text";
  if (model.kind == "gpt" && !is_text) {
    return ConfigConflict{"data.kind",
                          cadre::format("must be text for model.kind gpt, which predicts the next "
                                        "token; {} has images: use model.kind cnn or mlp",
                                        config.data.kind)};
  }
  if (model.kind == "cnn" && is_text) {
    return ConfigConflict{"model.kind",
                          "cnn classifies images, but data.kind is text: use data.kind mnist or "
                          "synthetic, or model.kind gpt or mlp"};
  }
  if (config.data.kind == "mnist" && config.data.path == DataConfig().path) {
    return ConfigConflict{"data.kind", "mnist needs data.path: the folder of the idx files"};
  }
  if (model.kind == "gpt" && model.width % model.heads != 0) {
    return ConfigConflict{
        "model.heads", cadre::format("must divide model.width: {} heads cannot share {} features",
                                     model.heads, model.width)};
  }
  return find_expert_conflict(config);
}

// Reports keys that change the results and that the strategy does not support. Keys that only save
// memory or time are ignored under a strategy that does not use them.
std::optional<ConfigConflict> find_parallel_conflict(const ParallelConfig& parallel) {
  if (parallel.form == "mapped" && parallel.offload != "none") {
    return ConfigConflict{"parallel.form",
                          "is mapped, but parallel.offload keeps the parameters in files, from "
                          "which they are gathered: choose auto, or parallel.offload=none"};
  }
  if (has_units(data_strategy(parallel))) return std::nullopt;
  const std::array<std::pair<const char*, std::string>, 2> dtypes = {
      {{"parallel.parameter_dtype", parallel.parameter_dtype},
       {"parallel.reduce_dtype", parallel.reduce_dtype}}};
  for (const auto& [key, dtype] : dtypes) {
    if (dtype == "float32") continue;
    return ConfigConflict{
        key, cadre::format("is {}, which only parallel.strategy fsdp and hsdp support, not {}: "
                           "choose one of them, or float32; run.autocast=bfloat16 computes in "
                           "bfloat16 under every strategy",
                           dtype, parallel.strategy)};
  }
  return std::nullopt;
}

}  // namespace

std::optional<ConfigConflict> find_conflict(const Config& config) {
  if (auto conflict = find_model_conflict(config)) return conflict;
  if (auto conflict = find_parallel_conflict(config.parallel)) return conflict;
  if (auto conflict = find_layout_conflict(config)) return conflict;
  if (config.run.epochs == 0 && config.schedule.warmup_steps > config.run.steps) {
    return ConfigConflict{"schedule.warmup_steps",
                          cadre::format("is {}, more than run.steps, which is {}: set both, or "
                                        "schedule.warmup_steps=-1, which is a tenth of the steps",
                                        config.schedule.warmup_steps, config.run.steps)};
  }
  if (config.run.global_batch_size % config.run.accumulate != 0) {
    return ConfigConflict{
        "run.global_batch_size",
        cadre::format("is {}, which is not a multiple of run.accumulate ({}): the samples of all "
                      "processes in one step are split into that many parts of equal size",
                      config.run.global_batch_size, config.run.accumulate)};
  }
  if (config.data.kind == "text" && config.run.evaluate_tokens <= config.model.context) {
    return ConfigConflict{
        "run.evaluate_tokens",
        cadre::format("is {}; one sample takes model.context + 1 tokens, which is {}",
                      config.run.evaluate_tokens, config.model.context + 1)};
  }
  const OptimizerConfig& optimizer = config.optimizer;
  if (optimizer.kind == "sgd" && optimizer.nesterov && optimizer.momentum == 0) {
    return ConfigConflict{"optimizer.nesterov", "needs optimizer.momentum above 0"};
  }
  const std::string& name = config.run.name;
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
      printable(name) != name) {
    return ConfigConflict{"run.name",
                          cadre::format("must be a plain folder name, is \"{}\"", printable(name))};
  }
  const double temperature = config.sample.temperature;
  if (temperature > 0 && temperature < kMinTemperature) {
    return ConfigConflict{
        "sample.temperature",
        cadre::format("is {}, by which float32 cannot divide: choose 0, which generates the most "
                      "likely token each time, or at least {}",
                      temperature, kMinTemperature)};
  }
  return std::nullopt;
}

}  // namespace cadre::train
