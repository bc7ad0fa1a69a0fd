#include "cadre/train/planning/config_plan.h"

#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/data/text_corpus.h"
#include "cadre/train/models/image_classifier.h"
#include "cadre/train/models/language_model.h"
#include "cadre/train/strategy.h"

namespace cadre::train {
namespace {

// During its lifetime this thread creates tensors on the meta device, which have sizes but no
// memory, and functions that set their values do nothing. libtorch selects the kernel of a factory
// function in BackendSelect by the requested device; with that key excluded it selects the included
// key.
class MetaScope {
 public:
  MetaScope()
      : without_device_(c10::DispatchKey::BackendSelect), on_meta_(c10::DispatchKey::Meta) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard without_device_;
  c10::impl::IncludeDispatchKeyGuard on_meta_;
};

std::shared_ptr<Model> make_model(const Config& config) {
  if (config.data.kind == "text") return make_language_model(config.model, kVocabularySize, 0);
  return make_image_classifier(config.model, 0);
}

PlanStrategy strategy_of(const std::string& name) {
  for (const PlanStrategy strategy :
       {PlanStrategy::kSingle, PlanStrategy::kDdp, PlanStrategy::kZero1, PlanStrategy::kZero2,
        PlanStrategy::kFsdp}) {
    if (name == to_string(strategy)) return strategy;
  }
  return PlanStrategy::kHsdp;
}

Reshard reshard_named(const std::string& name) {
  if (name == "after_forward") return Reshard::kAfterForward;
  return name == "after_backward" ? Reshard::kAfterBackward : Reshard::kAfterReduction;
}

// The states of the optimizers in train/optimizer.cpp.
OptimizerSizes optimizer_sizes(const OptimizerConfig& config) {
  const int decay = config.weight_decay > 0 ? 1 : 0;  // a copy of the gradient
  const int momentum = config.momentum > 0 ? 1 : 0;
  if (config.kind == "sgd") return {.states = momentum};
  if (config.kind == "adagrad") return {.states = 1};
  if (config.kind == "rmsprop") return {.states = 1 + momentum, .temporaries = 1 + decay};
  if (config.kind == "adadelta") return {.states = 2, .temporaries = 2 + decay};
  return {.states = 2};  // Adam and AdamW
}

PlanOptions plan_options(const Config& config, const Processes& processes) {
  const ParallelConfig& parallel = config.parallel;
  PlanOptions options = {.strategy = strategy_of(parallel.strategy),
                         .num_ranks = processes.count,
                         .ranks_per_host = processes.per_host,
                         .optimizer = optimizer_sizes(config.optimizer),
                         .accumulate = config.run.accumulate,
                         .reshard = reshard_named(parallel.reshard)};
  if (options.strategy == PlanStrategy::kHsdp) {
    options.num_replicas = static_cast<int>(parallel.replicas);
  }
  if (!has_units(options.strategy)) return options;
  options.is_mapped = shard_form(parallel) == ShardForm::kMapped;
  const auto dtype_named = [](const std::string& name) {
    return name == "bfloat16" ? DType::kBfloat16 : DType::kFloat32;
  };
  if (parallel.parameter_dtype != "float32") {
    options.parameter_dtype = dtype_named(parallel.parameter_dtype);
  }
  if (parallel.reduce_dtype != parallel.parameter_dtype) {
    options.reduce_dtype = dtype_named(parallel.reduce_dtype);
  }
  return options;
}

bool fits(const ParallelConfig& parallel, const Processes& processes) {
  return parallel.strategy != "hsdp" || processes.count % parallel.replicas == 0;
}

}  // namespace

ModelSizes sizes_of_model(const Config& config) {
  const MetaScope scope;
  const std::shared_ptr<Model> model = make_model(config);
  ModelSizes sizes = model_sizes_of(model, [](const WrapCandidate&) { return true; });
  for (const auto& parameter : model->named_parameters()) {
    if (parameter.value().is_meta()) continue;
    throw Error(ErrorCode::kInternal,
                cadre::format("planning: \"{}\" was made with memory; report this with the "
                              "configuration",
                              parameter.key()));
  }
  return sizes;
}

MemoryPlan plan_of_config(const Config& config, const ModelSizes& model,
                          const Processes& processes) {
  check_strategy(config.parallel, processes.count);
  return plan_memory(model, plan_options(config, processes));
}

std::vector<NamedPlan> plans_of_strategies(const Config& config, const ModelSizes& model,
                                           const Processes& processes) {
  std::vector<NamedPlan> plans;
  const auto add = [&](const std::string& strategy, const std::string& reshard) {
    Config other = config;
    other.parallel.strategy = strategy;
    if (!reshard.empty()) other.parallel.reshard = reshard;
    if (!fits(other.parallel, processes)) return;
    const bool is_sharded = !reshard.empty();
    plans.push_back(
        {.name = is_sharded ? cadre::format("{}, {}", strategy, reshard) : strategy,
         .is_chosen = strategy == config.parallel.strategy &&
                      (!is_sharded || reshard == config.parallel.reshard),
         .plan = plan_memory(model,
                             plan_options(other, strategy == "single" ? Processes{} : processes))});
  };
  for (const char* strategy : {"single", "ddp", "zero1", "zero2"}) add(strategy, "");
  for (const char* strategy : {"fsdp", "hsdp"}) {
    for (const char* reshard : {"after_forward", "after_backward", "after_reduction"}) {
      add(strategy, reshard);
    }
  }
  return plans;
}

}  // namespace cadre::train
