// The memory and the traffic of each process of a configured run, under the strategy of the
// configuration and under the others.
//
// Threads: one. Blocking: never. Lifetime: values. Errors: kInvalidArgument for a strategy that the
// number of processes does not allow. The model is constructed without memory for its values; data
// are not opened.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cadre/plan/memory_plan.h"
#include "cadre/train/config/config.h"

namespace cadre::train {

struct Processes {
  int count = 1;
  int per_host = 1;
};

// Names, sizes and units of the model that the configuration describes.
ModelSizes sizes_of_model(const Config& config);

// Under the strategy of the configuration.
MemoryPlan plan_of_config(const Config& config, const ModelSizes& model,
                          const Processes& processes);

struct NamedPlan {
  std::string name;        // "fsdp, after_backward"
  bool is_chosen = false;  // by the configuration
  MemoryPlan plan;
};
// The plans of all strategies of the trainer, with the other keys of the configuration; single has
// one process. Without hsdp if parallel.replicas does not divide the number of processes.
std::vector<NamedPlan> plans_of_strategies(const Config& config, const ModelSizes& model,
                                           const Processes& processes);

}  // namespace cadre::train
