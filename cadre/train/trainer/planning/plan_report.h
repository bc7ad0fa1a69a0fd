// Prints plans as text and as JSON.
//
// Threads: pure functions. Errors: none.
#pragma once

#include <span>
#include <string>

#include "cadre/parallel/plan/memory_plan.h"
#include "cadre/train/trainer/config/config.h"
#include "cadre/train/trainer/planning/config_plan.h"

namespace cadre::train {

// Returns the table that a run prints at its start: the bytes that a process holds, and the bytes
// that a step transfers.
std::string start_table(const NamedPlan& named);

// Returns a table with one row for each plan, which marks the plan of the configuration, followed
// by a table of the units of that plan.
std::string comparison_table(const Config& config, const ModelSizes& model,
                             std::span<const NamedPlan> plans);

// Returns {"model": ..., "strategies": [{"name": ..., "held_bytes": {...}, ...}, ...]}.
std::string plans_json(const Config& config, const ModelSizes& model,
                       std::span<const NamedPlan> plans);

}  // namespace cadre::train
