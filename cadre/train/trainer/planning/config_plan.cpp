#include "cadre/train/trainer/planning/config_plan.h"

#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/train/data/text_corpus.h"
#include "cadre/train/trainer/config/config_fields.h"
#include "cadre/train/trainer/models/image_classifier.h"
#include "cadre/train/trainer/models/language_model.h"
#include "cadre/train/trainer/planning/part_sizes.h"
#include "cadre/train/trainer/strategy/run_layout.h"
#include "cadre/train/trainer/strategy/strategy.h"

namespace cadre::train {
namespace {

// While this object exists, this thread creates tensors on the meta device: they have sizes but no
// memory, and functions that set their values do nothing. Factory functions select the device
// through the dispatch key BackendSelect, so that key is excluded and the key of the meta device is
// included instead.
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

// Returns the sizes of the states of the optimizers that train/trainer/strategy/optimizer.cpp
// makes.
PlanOptions::Optimizer optimizer_sizes(const OptimizerConfig& config) {
  // Weight decay takes a temporary copy of the gradient.
  const int decay = config.weight_decay > 0 ? 1 : 0;
  const int momentum = config.momentum > 0 ? 1 : 0;
  if (config.kind == "sgd") return {.states = momentum};
  if (config.kind == "adagrad") return {.states = 1};
  if (config.kind == "rmsprop") return {.states = 1 + momentum, .temporaries = 1 + decay};
  if (config.kind == "adadelta") return {.states = 2, .temporaries = 2 + decay};
  return {.states = 2};  // Adam and AdamW
}

PlanOptions plan_options(const Config& config, const Processes& processes) {
  const ParallelConfig& parallel = config.parallel;
  PlanOptions options = {.strategy = data_strategy(parallel),
                         .num_ranks = processes.count,
                         .ranks_per_host = processes.per_host,
                         .optimizer = optimizer_sizes(config.optimizer),
                         .is_on_device = processes.on_devices,
                         .accumulate = config.run.accumulate,
                         .reshard = reshard_of(parallel)};
  if (options.strategy == DataStrategy::kHsdp) {
    options.num_replicas = num_replicas(parallel);
  }
  if (!has_units(options.strategy)) return options;
  options.is_mapped = !processes.on_devices && shard_form(parallel) == ShardForm::kMapped;
  if (parallel.parameter_dtype != "float32") {
    options.parameter_dtype = parse_dtype(parallel.parameter_dtype);
  }
  if (parallel.reduce_dtype != parallel.parameter_dtype) {
    options.reduce_dtype = parse_dtype(parallel.reduce_dtype);
  }
  return options;
}

// Returns the processes among which parallel.strategy works, as if they were a separate job. These
// are the processes with different rows of the batch.
Processes processes_of_strategy(const Degrees& degrees, const Processes& processes) {
  const int of_a_replica = processes.count / degrees.data;
  return {.count = degrees.data,
          .per_host = std::max(processes.per_host / of_a_replica, 1),
          .on_devices = processes.on_devices};
}

// Returns the plan for the stages of a pipeline. The pipeline reduces the gradients of a stage in
// place. With shards, a whole stage is one unit, which stays gathered for the whole step.
MemoryPlan plan_of_stages(const ModelSizes& part, const Config& config,
                          const Processes& processes) {
  if (PlanOptions options = plan_options(config, processes);
      processes.count > 1 && has_units(options.strategy)) {
    options.is_mapped = false;
    options.reshard_root = Reshard::kAfterReduction;
    return plan_memory(part, options);
  }
  // A process holds as much as a single process whose whole model is this part.
  Config alone = config;
  alone.parallel.strategy = "single";
  MemoryPlan plan = plan_memory(part, plan_options(alone, {.on_devices = processes.on_devices}));
  for (const ParameterSize& parameter : part.parameters) {
    OperationTraffic& reduced = plan.traffic.all_reduce;
    const int64_t payload = parameter.numel() * static_cast<int64_t>(sizeof(float));
    if (processes.count == 1) break;
    reduced.payload_bytes += payload;
    reduced.received_bytes += 2 * payload * (processes.count - 1) / processes.count;
    reduced.num_calls = config.parallel.virtual_stages;
  }
  return plan;
}

// Returns the plan of the process that holds the most memory.
NamedPlan plan_of_division(const Config& config, const ModelSizes& model,
                           const Processes& processes) {
  const Degrees degrees = degrees_of(config.parallel, processes.count);
  const Processes replicas = processes_of_strategy(degrees, processes);
  std::optional<NamedPlan> most;
  for (int rank = 0; rank < degrees.pipeline; ++rank) {
    const ModelSizes part = part_sizes(model, config, degrees, rank);
    MemoryPlan plan = degrees.pipeline > 1 ? plan_of_stages(part, config, replicas)
                                           : plan_memory(part, plan_options(config, replicas));
    const int64_t copy_bytes = tied_copy_bytes(part, config, degrees, rank);
    plan.held.parameters += copy_bytes;
    plan.held.gradients += copy_bytes;
    if (most && plan.held.total() <= most->plan.held.total()) continue;
    plan.host_bytes = plan.held.total() * std::min(processes.per_host, processes.count);
    most = NamedPlan{.plan = std::move(plan),
                     .division = division_traffic(part, config, degrees, rank)};
  }
  return *most;
}

NamedPlan plan_of(const Config& config, const ModelSizes& model, const Processes& processes) {
  NamedPlan named = config.parallel.divides_model()
                        ? plan_of_division(config, model, processes)
                        : NamedPlan{.plan = plan_memory(model, plan_options(config, processes))};
  named.num_processes = processes.count;
  return named;
}

bool fits(const Config& config, const Processes& processes) {
  if (find_layout_conflict(config)) return false;
  const Degrees degrees = degrees_of(config.parallel, processes.count);
  return config.parallel.strategy != "hsdp" || degrees.data % num_replicas(config.parallel) == 0;
}

}  // namespace

ModelSizes sizes_of_model(const Config& config) {
  const MetaScope scope;
  const std::shared_ptr<Model> model = make_model(config);
  ModelSizes sizes = model_sizes_of(model, wrap_shard_units());
  for (const auto& parameter : model->named_parameters()) {
    if (parameter.value().is_meta()) continue;
    throw Error(ErrorCode::kInternal,
                cadre::format("planning: \"{}\" was made with memory; report this with the "
                              "configuration",
                              parameter.key()));
  }
  return sizes;
}

NamedPlan plan_of_config(const Config& config, const ModelSizes& model,
                         const Processes& processes) {
  check_layout(config, processes.count);
  NamedPlan named = plan_of(config, model, processes);
  named.name = layout_name(config.parallel);
  named.is_chosen = true;
  return named;
}

std::vector<NamedPlan> plans_of_strategies(const Config& config, const ModelSizes& model,
                                           const Processes& processes) {
  std::vector<NamedPlan> plans;
  const auto add = [&](const std::string& strategy, const std::string& reshard) {
    Config other = config;
    other.parallel.strategy = strategy;
    if (!reshard.empty()) other.parallel.reshard = reshard;
    // The row "single" always describes one process with the whole model.
    const bool is_single = strategy == "single" && config.parallel.strategy != "single";
    if (is_single) other.parallel = {.strategy = strategy};
    const Processes own = strategy == "single" && !other.parallel.divides_model()
                              ? Processes{.on_devices = processes.on_devices}
                              : processes;
    if (!fits(other, own)) return;
    NamedPlan named = plan_of(other, model, own);
    named.name = layout_name(other.parallel);
    if (!reshard.empty()) named.name += ", " + reshard;
    named.is_chosen = strategy == config.parallel.strategy &&
                      (reshard.empty() || reshard == config.parallel.reshard);
    plans.push_back(std::move(named));
  };
  for (const char* strategy : {"single", "ddp", "zero1", "zero2"}) add(strategy, "");
  for (const char* strategy : {"fsdp", "hsdp"}) {
    if (config.parallel.pipeline > 1) {
      add(strategy, "");
      continue;
    }
    for (const char* reshard : {"after_forward", "after_backward", "after_reduction"}) {
      add(strategy, reshard);
    }
  }
  return plans;
}

}  // namespace cadre::train
