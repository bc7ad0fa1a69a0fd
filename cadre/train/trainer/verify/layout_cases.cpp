#include "cadre/train/trainer/verify/layout_cases.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/train/trainer/strategy/run_layout.h"

namespace cadre::train {
namespace {

struct Division {
  int pipeline = 1;
  int expert = 1;
  int context = 1;
  int tensor = 1;
  int size() const { return pipeline * expert * context * tensor; }
};

// Returns the divisions that the number of processes allows. Those that the model does not allow
// are removed later.
std::vector<Division> divisions_of(int world_size) {
  std::vector<Division> divisions;
  for (const int pipeline : {1, 2}) {
    for (const int expert : {1, 2}) {
      for (const int context : {1, 2}) {
        for (const int tensor : {1, 2}) {
          const Division division{pipeline, expert, context, tensor};
          if (division.size() > 1 && world_size % division.size() == 0) {
            divisions.push_back(division);
          }
        }
      }
    }
  }
  if (world_size > 2) {
    divisions.push_back({.pipeline = world_size});
    divisions.push_back({.expert = world_size});
    divisions.push_back({.context = world_size});
    divisions.push_back({.tensor = world_size});
  }
  return divisions;
}

// Returns why the configuration cannot run with this number of processes; an empty text if it can.
std::string problem_of(const Config& config, int world_size) {
  try {
    check_layout(config, world_size);
    return {};
  } catch (const Error& error) {
    return error.message();
  }
}

// Returns the multiple of `factor` that is nearest to `value`, but at least `factor`.
int64_t nearest_multiple(int64_t value, int64_t factor) {
  return std::max<int64_t>(1, (value + factor / 2) / factor) * factor;
}

// A setting that may have to be changed before a layout can run.
struct Setting {
  const char* key;
  int64_t* value;
  int64_t wanted;
};

// Returns the settings that decide whether a layout can divide the model and the batch, each with
// the nearest value that allows it.
std::vector<Setting> settings_for(Config& config, int world_size) {
  ParallelConfig& parallel = config.parallel;
  const int64_t parts = parallel.pipeline * parallel.expert * parallel.context * parallel.tensor;
  const int64_t num_shares = std::max<int64_t>(1, world_size / parts) * parallel.expert;
  int64_t heads = nearest_multiple(config.model.heads, parallel.tensor);
  while (heads < config.model.width && config.model.width % heads != 0) heads += parallel.tensor;
  return {{"model.layers", &config.model.layers,
           nearest_multiple(config.model.layers, parallel.pipeline * parallel.virtual_stages)},
          {"model.heads", &config.model.heads, heads},
          {"model.context", &config.model.context,
           nearest_multiple(config.model.context, 2 * parallel.context * parallel.tensor)},
          {"model.experts", &config.model.experts,
           config.model.experts == 0 ? 0 : nearest_multiple(config.model.experts, parallel.expert)},
          {"run.global_batch_size", &config.run.global_batch_size,
           nearest_multiple(config.run.global_batch_size, num_shares * parallel.pipeline)},
          {"parallel.microbatches", &parallel.microbatches, 0},
          {"parallel.virtual_stages", &parallel.virtual_stages, 1}};
}

// Returns the smallest set of these settings with which the configuration can run, each at most
// doubled; an empty text if no set suffices.
std::string small_change(Config config, int world_size) {
  std::vector<Setting> changed;
  for (Setting setting : settings_for(config, world_size)) {
    if (setting.wanted == *setting.value || setting.wanted > 2 * *setting.value) continue;
    std::swap(*setting.value, setting.wanted);
    changed.push_back(setting);
  }
  if (!problem_of(config, world_size).empty()) return {};
  std::string text;
  for (Setting& setting : changed) {
    std::swap(*setting.value, setting.wanted);
    if (problem_of(config, world_size).empty())
      // The configuration runs without changing this setting.
      continue;
    std::swap(*setting.value, setting.wanted);
    text += cadre::format("{}{}={}", text.empty() ? "" : " ", setting.key, *setting.value);
  }
  return text;
}

StrategyCase case_of(const ParallelConfig& parallel) {
  const DataStrategy strategy = data_strategy(parallel);
  StrategyCase own{
      .strategy = strategy == DataStrategy::kSingle ? DataStrategy::kDdp : strategy,
      .pipeline = static_cast<int>(parallel.pipeline),
      .expert = static_cast<int>(parallel.expert),
      .context = static_cast<int>(parallel.context),
      .tensor = static_cast<int>(parallel.tensor),
      .is_sequence_parallel = parallel.sequence,
  };
  if (has_units(own.strategy)) {
    own.reshard = reshard_of(parallel);
    own.form = parallel.form == "mapped" ? ShardForm::kMapped : ShardForm::kGathered;
  }
  if (own.strategy == DataStrategy::kHsdp) {
    own.num_replicas = num_replicas(parallel);
  }
  return own;
}

// Returns the cases of a division: every strategy, between the replicas that the division leaves.
std::vector<StrategyCase> cases_of(const Division& division, int world_size) {
  std::vector<StrategyCase> cases;
  const int num_data = world_size / division.size();
  for (const DataStrategy strategy : kDataStrategies) {
    if (strategy == DataStrategy::kSingle) continue;
    if (num_data == 1 && strategy != DataStrategy::kDdp) continue;
    StrategyCase next{.strategy = strategy,
                      .pipeline = division.pipeline,
                      .expert = division.expert,
                      .context = division.context,
                      .tensor = division.tensor};
    if (strategy == DataStrategy::kHsdp) {
      if (num_data < 4) continue;
      next.num_replicas = 2;
    }
    cases.push_back(next);
    if (division.tensor == 1 || strategy != DataStrategy::kDdp) continue;
    next.is_sequence_parallel = true;
    cases.push_back(next);
  }
  return cases;
}

// Adds the layout of the configuration itself. If it is a strategy that does not divide the model
// and can run, it is among the cases already.
void add_own(const Config& config, int world_size, LayoutCases& cases) {
  const ParallelConfig& parallel = config.parallel;
  // The configuration is for one process, which is the reference itself.
  if (parallel.strategy == "single" && !parallel.divides_model()) return;
  StrategyCase own = case_of(parallel);
  const std::string problem = problem_of(config, world_size);
  if (!problem.empty()) {
    cases.impossible.push_back({.strategy = own,
                                .reason = problem,
                                .change = small_change(config, world_size),
                                .is_own = true});
    return;
  }
  if (!parallel.divides_model()) return;
  cases.possible.push_back(own);
  if (config.run.accumulate == 1) return;
  own.num_parts = config.run.accumulate;
  cases.possible.push_back(own);
}

}  // namespace

LayoutCases layout_cases(const Config& config, int world_size) {
  LayoutCases cases;
  const auto add = [&](const StrategyCase& strategy) {
    const auto is_it = [&](const ImpossibleLayout& known) { return known.strategy == strategy; };
    if (std::ranges::find(cases.possible, strategy) != cases.possible.end()) return;
    if (std::ranges::any_of(cases.impossible, is_it)) return;
    const Config changed = config_of(config, strategy);
    const std::string problem = problem_of(changed, world_size);
    if (problem.empty()) {
      cases.possible.push_back(strategy);
    } else {
      cases.impossible.push_back(
          {.strategy = strategy,
           .reason = problem,
           .change = config.model.kind == "gpt" ? small_change(changed, world_size) : ""});
    }
  };
  add_own(config, world_size, cases);
  for (const Division& division : divisions_of(world_size)) {
    for (const StrategyCase& strategy : cases_of(division, world_size)) add(strategy);
  }
  return cases;
}

Config config_of(const Config& config, const StrategyCase& strategy) {
  Config changed = config;
  ParallelConfig& parallel = changed.parallel;
  parallel.strategy = std::string(to_string(strategy.strategy));
  parallel.reshard = std::string(to_string(strategy.reshard));
  parallel.replicas = strategy.num_replicas;
  const bool is_mapped = strategy.form == ShardForm::kMapped;
  parallel.form = is_mapped ? "mapped" : "gathered";
  if (is_mapped) parallel.offload = "none";
  parallel.pipeline = strategy.pipeline;
  parallel.expert = strategy.expert;
  parallel.context = strategy.context;
  parallel.tensor = strategy.tensor;
  parallel.sequence = strategy.is_sequence_parallel;
  if (strategy.pipeline == 1) {
    parallel.microbatches = 0;
    parallel.virtual_stages = 1;
  } else {
    parallel.offload = "none";
    changed.run.accumulate = 1;
  }
  return changed;
}

}  // namespace cadre::train
