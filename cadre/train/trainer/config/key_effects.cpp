#include <array>

#include "cadre/train/trainer/config/config_fields.h"

namespace cadre::train {
namespace {

struct Condition {
  std::string_view key;  // a whole key, or a section's name with a dot for all of its keys
  bool (*is_met)(const Config&);
};

bool is_gpt(const Config& config) {
  return config.model.kind == "gpt";
}
bool is_text(const Config& config) {
  return config.data.kind == "text";
}
bool has_experts(const Config& config) {
  return is_gpt(config) && config.model.experts > 0;
}
bool is_adam(const Config& config) {
  return config.optimizer.kind == "adam" || config.optimizer.kind == "adamw";
}
bool is_step_schedule(const Config& config) {
  return config.schedule.kind == "step";
}
bool shards_model(const Config& config) {
  return has_units(data_strategy(config.parallel));
}
bool has_pipeline(const Config& config) {
  return config.parallel.pipeline > 1;
}

// Keys that have an effect only in some configurations, each with its condition.
constexpr std::array<Condition, 38> kConditions{{
    {"model.layers", [](const Config& config) { return config.model.kind != "cnn"; }},
    {"model.heads", is_gpt},
    {"model.width", [](const Config& config) { return config.model.kind != "cnn"; }},
    {"model.context", is_text},
    {"model.window",
     [](const Config& config) { return config.model.kind == "mlp" && is_text(config); }},
    {"model.dropout", [](const Config& config) { return config.model.kind == "cnn"; }},
    {"model.dropout_rate", is_gpt},
    {"model.tied", is_gpt},
    {"model.experts", is_gpt},
    {"model.experts_per_token", has_experts},
    {"model.capacity_factor", has_experts},
    {"model.auxiliary_loss", has_experts},
    {"data.path", [](const Config& config) { return config.data.kind != "synthetic"; }},
    {"data.suffixes", is_text},
    {"data.skipped_folders", is_text},
    {"data.samples", [](const Config& config) { return config.data.kind == "synthetic"; }},
    {"optimizer.beta1", is_adam},
    {"optimizer.beta2", is_adam},
    {"optimizer.epsilon", [](const Config& config) { return config.optimizer.kind != "sgd"; }},
    {"optimizer.alpha", [](const Config& config) { return config.optimizer.kind == "rmsprop"; }},
    {"optimizer.rho", [](const Config& config) { return config.optimizer.kind == "adadelta"; }},
    {"optimizer.rate_decay",
     [](const Config& config) { return config.optimizer.kind == "adagrad"; }},
    {"optimizer.momentum",
     [](const Config& config) {
       return config.optimizer.kind == "sgd" || config.optimizer.kind == "rmsprop";
     }},
    {"optimizer.nesterov", [](const Config& config) { return config.optimizer.kind == "sgd"; }},
    {"schedule.final_fraction",
     [](const Config& config) { return config.schedule.kind == "cosine"; }},
    {"schedule.step_size", is_step_schedule},
    {"schedule.gamma", is_step_schedule},
    {"run.evaluate_tokens", is_text},
    {"parallel.replicas",
     [](const Config& config) { return data_strategy(config.parallel) == DataStrategy::kHsdp; }},
    {"parallel.form", shards_model},
    {"parallel.reshard", shards_model},
    {"parallel.offload", shards_model},
    {"parallel.sequence", [](const Config& config) { return config.parallel.tensor > 1; }},
    {"parallel.schedule", has_pipeline},
    {"parallel.microbatches", has_pipeline},
    {"parallel.virtual_stages", has_pipeline},
    {"parallel.attention", [](const Config& config) { return config.parallel.context > 1; }},
    {"sample.", is_text},
}};

}  // namespace

bool has_effect(std::string_view key, const Config& config) {
  for (const Condition& condition : kConditions) {
    const bool is_section = condition.key.ends_with('.');
    if (is_section ? key.starts_with(condition.key) : key == condition.key) {
      return condition.is_met(config);
    }
  }
  return true;
}

}  // namespace cadre::train
