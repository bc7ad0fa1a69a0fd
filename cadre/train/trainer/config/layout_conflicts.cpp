#include <string>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/train/trainer/config/config_fields.h"

namespace cadre::train {
namespace {

std::optional<ConfigConflict> find_missing_division(const Config& config) {
  const ParallelConfig& parallel = config.parallel;
  if (parallel.sequence && parallel.tensor == 1) {
    return ConfigConflict{"parallel.sequence",
                          "divides the tokens among the processes of parallel.tensor, which is 1: "
                          "set parallel.tensor, or parallel.sequence=false"};
  }
  if (parallel.expert > 1 && config.model.experts == 0) {
    return ConfigConflict{"parallel.expert",
                          cadre::format("is {}, but model.experts is 0, so there are no experts to "
                                        "divide: set model.experts, or leave the key out",
                                        parallel.expert)};
  }
  if (parallel.pipeline > 1) return std::nullopt;
  if (parallel.microbatches > 0 || parallel.virtual_stages > 1) {
    const bool is_microbatches = parallel.microbatches > 0;
    return ConfigConflict{
        is_microbatches ? "parallel.microbatches" : "parallel.virtual_stages",
        cadre::format("is {}, but parallel.pipeline is 1, so there is no pipeline: set "
                      "parallel.pipeline, or leave the key out",
                      is_microbatches ? parallel.microbatches : parallel.virtual_stages)};
  }
  return std::nullopt;
}

std::optional<ConfigConflict> find_wrong_size(const Config& config) {
  const ParallelConfig& parallel = config.parallel;
  const ModelConfig& model = config.model;
  if (model.heads % parallel.tensor != 0) {
    return ConfigConflict{"parallel.tensor",
                          cadre::format("is {}, which does not divide the {} heads of model.heads",
                                        parallel.tensor, model.heads)};
  }
  if (parallel.context > 1 && model.context % (2 * parallel.context) != 0) {
    return ConfigConflict{
        "parallel.context",
        cadre::format("is {}: twice that, {}, must divide the {} tokens of model.context, so that "
                      "causal attention is equal work for all of its processes",
                      parallel.context, 2 * parallel.context, model.context)};
  }
  const int64_t num_tokens = model.context / parallel.context;
  if (parallel.sequence && num_tokens % parallel.tensor != 0) {
    return ConfigConflict{
        "parallel.sequence",
        cadre::format("divides the {} tokens that a process has of a sample among the {} processes "
                      "of parallel.tensor, which do not divide them",
                      num_tokens, parallel.tensor)};
  }
  const int64_t num_heads = model.heads / parallel.tensor;
  if (parallel.attention == "all_to_all" && num_heads % parallel.context != 0) {
    return ConfigConflict{
        "parallel.attention",
        cadre::format("is all_to_all, but parallel.context, {}, does not divide the {} heads that "
                      "a process has: choose ring",
                      parallel.context, num_heads)};
  }
  const int64_t num_stages = parallel.pipeline * parallel.virtual_stages;
  if (model.layers % num_stages != 0) {
    return ConfigConflict{
        "parallel.pipeline",
        cadre::format("makes {} stages (parallel.pipeline * parallel.virtual_stages), which do not "
                      "divide the {} blocks of model.layers",
                      num_stages, model.layers)};
  }
  return std::nullopt;
}

// Returns the first setting that cannot be combined with experts.
std::optional<ConfigConflict> find_unsupported_with_experts(const Config& config) {
  const ParallelConfig& parallel = config.parallel;
  const int64_t num_experts = config.model.experts;
  if (num_experts == 0) return std::nullopt;
  if (num_experts % parallel.expert != 0) {
    return ConfigConflict{
        "parallel.expert",
        cadre::format("is {}, which does not divide the {} experts of model.experts",
                      parallel.expert, num_experts)};
  }
  if (parallel.pipeline > 1) {
    return ConfigConflict{
        "parallel.pipeline",
        cadre::format("is {}, but model.experts is {}, and {}: choose 1", parallel.pipeline,
                      num_experts,
                      config.model.auxiliary_loss > 0
                          ? "the load-balancing loss of a step is not the mean of those of the "
                            "microbatches of a pipeline"
                          : "the trainer does not divide the experts of a pipeline's stages")};
  }
  if (parallel.sequence) {
    return ConfigConflict{
        "parallel.sequence",
        "divides the tokens between the matrices, but each process of parallel.tensor gives all "
        "tokens to the experts: choose false"};
  }
  if (config.model.capacity_factor > 0 && parallel.context > 1) {
    return ConfigConflict{
        "model.capacity_factor",
        cadre::format("is {}, which drops the last tokens of a step, but the processes of "
                      "parallel.context, {}, have other orders of the tokens than one process: "
                      "choose 0, or parallel.context=1",
                      config.model.capacity_factor, parallel.context)};
  }
  const bool has_auxiliary_loss = config.model.auxiliary_loss > 0;
  if (config.run.accumulate > 1 && (has_auxiliary_loss || config.model.capacity_factor > 0)) {
    return ConfigConflict{
        "run.accumulate",
        cadre::format(
            "is {}, but {}, and model.experts is {}: choose 1; "
            "model.checkpoint_activations=blocks saves memory, too",
            config.run.accumulate,
            has_auxiliary_loss
                ? "the load-balancing loss of a step is not the mean of those of its parts"
                : "model.capacity_factor limits the tokens of an expert in a whole step",
            num_experts)};
  }
  for (const auto& [key, dtype] : {std::pair{"run.autocast", config.run.autocast},
                                   {"parallel.parameter_dtype", parallel.parameter_dtype},
                                   {"parallel.reduce_dtype", parallel.reduce_dtype}}) {
    if (dtype == "float32") continue;
    return ConfigConflict{
        key, cadre::format("is {}, but a gpt with experts computes and reduces in float32: choose "
                           "float32",
                           dtype)};
  }
  return std::nullopt;
}

std::optional<ConfigConflict> find_unsupported(const Config& config) {
  const ParallelConfig& parallel = config.parallel;
  const bool has_dtypes =
      parallel.parameter_dtype != "float32" || parallel.reduce_dtype != "float32";
  if (config.run.autocast != "float32" || has_dtypes) {
    return ConfigConflict{
        has_dtypes ? "parallel.parameter_dtype" : "run.autocast",
        "is bfloat16 where a model is divided by parallel.tensor, pipeline or context, which "
        "compute and reduce in float32: choose float32"};
  }
  if (parallel.pipeline == 1) return std::nullopt;
  if (const DataStrategy strategy = data_strategy(parallel);
      strategy == DataStrategy::kZero1 || strategy == DataStrategy::kZero2) {
    return ConfigConflict{"parallel.strategy",
                          cadre::format("is {}, which a pipeline does not support: choose ddp, or "
                                        "fsdp, which shards optimizer state and gradients, too",
                                        parallel.strategy)};
  }
  if (parallel.form == "mapped" || parallel.offload != "none") {
    const bool is_mapped = parallel.form == "mapped";
    return ConfigConflict{
        is_mapped ? "parallel.form" : "parallel.offload",
        cadre::format("is {}, but the shards of a pipeline's stages are gathered, and kept in "
                      "memory: choose parallel.{}",
                      is_mapped ? parallel.form : parallel.offload,
                      is_mapped ? "form=auto" : "offload=none")};
  }
  if (config.run.accumulate > 1) {
    return ConfigConflict{
        "run.accumulate",
        cadre::format("is {}, but a pipeline computes its samples in microbatches, which save the "
                      "same memory: choose 1, and set parallel.microbatches",
                      config.run.accumulate)};
  }
  const bool has_both_ends = parallel.schedule == "zb-v" || parallel.schedule == "dualpipe-v";
  const bool is_sharded = has_units(data_strategy(parallel));
  if (has_both_ends && is_sharded && config.model.tied) {
    return ConfigConflict{
        "parallel.schedule",
        cadre::format("is {}, which puts the first and the last stage on one process, where {} "
                      "would shard the tied weight twice: choose model.tied=false, ddp, or another "
                      "schedule",
                      parallel.schedule, parallel.strategy)};
  }
  return std::nullopt;
}

}  // namespace

std::optional<ConfigConflict> find_layout_conflict(const Config& config) {
  const ParallelConfig& parallel = config.parallel;
  if (auto conflict = find_missing_division(config)) return conflict;
  if (auto conflict = find_unsupported_with_experts(config)) return conflict;
  if (!parallel.divides_model()) return std::nullopt;
  if (config.model.kind != "gpt") {
    const std::string key = parallel.tensor > 1     ? "parallel.tensor"
                            : parallel.pipeline > 1 ? "parallel.pipeline"
                            : parallel.context > 1  ? "parallel.context"
                                                    : "parallel.expert";
    return ConfigConflict{key, cadre::format("divides the gpt only, and model.kind is {}: choose 1",
                                             config.model.kind)};
  }
  if (auto conflict = find_wrong_size(config)) return conflict;
  return find_unsupported(config);
}

}  // namespace cadre::train
