// The layouts that `cadre verify` compares with a run of one process, in addition to the plain
// strategies: those that the model of the configuration and the number of processes allow.
//
// Threads: pure functions. Lifetime: values. Errors: none.
#pragma once

#include <string>
#include <vector>

#include "cadre/train/trainer/config/config.h"
#include "cadre/train/verify/strategy_case.h"

namespace cadre::train {

// A layout that cannot run with this configuration.
struct ImpossibleLayout {
  StrategyCase strategy;
  std::string reason;
  // The settings with which it can run, such as "model.layers=6", if small changes of the model or
  // the batch suffice; otherwise empty.
  std::string change;
  bool is_own = false;  // whether it is the layout of the configuration itself
};

struct LayoutCases {
  std::vector<StrategyCase> possible;
  std::vector<ImpossibleLayout> impossible;
};

// Returns the layout of the configuration first, then pipeline, expert, context and tensor
// parallelism: each on all processes, each by two, and each combination of them by two; all with
// every strategy between the remaining processes. If the configuration itself cannot run, its
// strategy is listed as impossible, even if it does not divide the model.
LayoutCases layout_cases(const Config& config, int world_size);

// Returns the configuration with the strategy and the divisions of the case.
Config config_of(const Config& config, const StrategyCase& strategy);

}  // namespace cadre::train
