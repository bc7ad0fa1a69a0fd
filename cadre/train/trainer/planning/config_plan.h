// Computes the memory and the traffic of each process of a configured run, under the strategy of
// the configuration and under the others.
//
// Threads: one. Blocking: never. Lifetime: values. Errors: kInvalidArgument for a strategy that the
// number of processes does not allow. The model is constructed without memory for its values; data
// are not opened.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cadre/parallel/plan/memory_plan.h"
#include "cadre/train/trainer/config/config.h"
#include "cadre/train/trainer/planning/part_sizes.h"

namespace cadre::train {

struct Processes {
  int count = 1;
  int per_host = 1;
};

// Returns the names, sizes and units of the model that the configuration describes.
ModelSizes sizes_of_model(const Config& config);

struct NamedPlan {
  std::string name = {};   // for example "fsdp, after_backward" or "ddp, tensor 2"
  bool is_chosen = false;  // the configuration chooses this plan
  int num_processes = 1;
  MemoryPlan plan;  // the plan of the process with the largest part of the model
  DivisionTraffic division = {};
};

// Returns the plan of the configuration's strategy.
NamedPlan plan_of_config(const Config& config, const ModelSizes& model, const Processes& processes);

// Returns the plans of all strategies of the trainer that the numbers of processes allow, with the
// other keys of the configuration. The plan of single has one process.
std::vector<NamedPlan> plans_of_strategies(const Config& config, const ModelSizes& model,
                                           const Processes& processes);

}  // namespace cadre::train
