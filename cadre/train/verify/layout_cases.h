// The layouts that `cadre verify` compares with one process, beside the strategies: those that the
// model of a configuration and the number of processes allow.
//
// Threads: pure functions. Blocking: never. Lifetime: values. Errors: none.
#pragma once

#include <vector>

#include "cadre/train/config/config.h"
#include "cadre/verify/strategy_case.h"

namespace cadre::train {

// Pipeline, expert, context and tensor parallelism: each on all processes, each by two, and two by
// two of each other, with every strategy of the processes that remain; and the layout of the
// configuration.
std::vector<StrategyCase> layout_cases(const Config& config, int world_size);

// The configuration under which a case runs.
Config config_of(const Config& config, const StrategyCase& strategy);

}  // namespace cadre::train
