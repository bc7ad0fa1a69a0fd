#include "cadre/train/verify/layout_cases.h"

#include <algorithm>
#include <array>
#include <string>

#include "cadre/base/error.h"
#include "cadre/train/layout/run_layout.h"

namespace cadre::train {
namespace {

constexpr std::array kStrategies{VerifiedStrategy::kDdp, VerifiedStrategy::kZero1,
                                 VerifiedStrategy::kZero2, VerifiedStrategy::kFsdp,
                                 VerifiedStrategy::kHsdp};

struct Division {
  int pipeline = 1;
  int expert = 1;
  int context = 1;
  int tensor = 1;
  int size() const { return pipeline * expert * context * tensor; }
};

// Those that the model does not allow are left out later.
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

bool is_possible(const Config& config, const StrategyCase& strategy, int world_size) {
  try {
    check_layout(config_of(config, strategy), world_size);
    return true;
  } catch (const Error&) {
    return false;
  }
}

StrategyCase case_of(const ParallelConfig& parallel) {
  const auto named = std::ranges::find_if(kStrategies, [&](VerifiedStrategy strategy) {
    return name_of(strategy) == parallel.strategy;
  });
  StrategyCase own{
      .strategy = named == kStrategies.end() ? VerifiedStrategy::kDdp : *named,
      .pipeline = static_cast<int>(parallel.pipeline),
      .expert = static_cast<int>(parallel.expert),
      .context = static_cast<int>(parallel.context),
      .tensor = static_cast<int>(parallel.tensor),
      .is_sequence_parallel = parallel.sequence,
  };
  if (own.strategy == VerifiedStrategy::kHsdp) {
    own.num_replicas = static_cast<int>(parallel.replicas);
  }
  return own;
}

}  // namespace

std::vector<StrategyCase> layout_cases(const Config& config, int world_size) {
  std::vector<StrategyCase> cases;
  const auto add = [&](const StrategyCase& strategy) {
    if (std::ranges::find(cases, strategy) != cases.end()) return;
    if (is_possible(config, strategy, world_size)) cases.push_back(strategy);
  };
  if (config.parallel.divides_model()) add(case_of(config.parallel));
  for (const Division& division : divisions_of(world_size)) {
    const int num_data = world_size / division.size();
    for (const VerifiedStrategy strategy : kStrategies) {
      if (num_data == 1 && strategy != VerifiedStrategy::kDdp) continue;
      StrategyCase next{.strategy = strategy,
                        .pipeline = division.pipeline,
                        .expert = division.expert,
                        .context = division.context,
                        .tensor = division.tensor};
      if (strategy == VerifiedStrategy::kHsdp) {
        if (num_data < 4) continue;
        next.num_replicas = 2;
      }
      add(next);
      if (division.tensor == 1 || strategy != VerifiedStrategy::kDdp) continue;
      next.is_sequence_parallel = true;
      add(next);
    }
  }
  return cases;
}

Config config_of(const Config& config, const StrategyCase& strategy) {
  Config changed = config;
  ParallelConfig& parallel = changed.parallel;
  parallel.strategy = std::string(name_of(strategy.strategy));
  parallel.reshard = std::string(name_of(strategy.reshard));
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
