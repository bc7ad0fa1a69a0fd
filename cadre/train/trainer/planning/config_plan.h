// Computes the memory and the traffic of each process of a configured run, under the strategy of
// the configuration and under the others.
//
// Threads: one. Blocking: never. Lifetime: values. Errors: kInvalidArgument for a strategy that is
// impossible with the number of processes. The model is constructed without memory for its values,
// and the data are not opened.
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
  bool on_devices = false;  // each has its model on a device that is not the CPU
};

// Returns the names and sizes of the parameters, and the units, of the configured model.
ModelSizes sizes_of_model(const Config& config);

struct NamedPlan {
  std::string name = {};   // for example "fsdp, after_backward" or "ddp, tensor 2"
  bool is_chosen = false;  // whether this is the plan of the configuration itself
  int num_processes = 1;
  MemoryPlan plan;  // the plan of the process that has the largest part of the model
  DivisionTraffic division = {};
};

// Returns the plan of the configuration's strategy.
NamedPlan plan_of_config(const Config& config, const ModelSizes& model, const Processes& processes);

// Returns the plans of all strategies that are possible with this number of processes; the other
// keys are those of the configuration. The plan "single" has one process.
std::vector<NamedPlan> plans_of_strategies(const Config& config, const ModelSizes& model,
                                           const Processes& processes);

}  // namespace cadre::train
