// The layouts that `cadre verify` compares with one process, in addition to the strategies: those
// that the model of a configuration and the number of processes allow.
//
// Threads: pure functions. Blocking: never. Lifetime: values. Errors: none.
#pragma once

#include <string>
#include <vector>

#include "cadre/train/trainer/config/config.h"
#include "cadre/train/verify/strategy_case.h"

namespace cadre::train {

// A layout that this configuration cannot run.
struct ImpossibleLayout {
  StrategyCase strategy;
  std::string reason;
  // Settings with which it can run, such as "model.layers=6", if small changes of the model or the
  // batch suffice; otherwise empty.
  std::string change;
  bool is_own = false;  // it is the layout of the configuration itself
};

struct LayoutCases {
  std::vector<StrategyCase> possible;
  std::vector<ImpossibleLayout> impossible;
};

// Returns the layout of the configuration, which is first, and pipeline, expert, context and tensor
// parallelism: each on all processes, each by two, and each combination of them by two, with every
// strategy of the remaining processes. If the configuration itself cannot run, its strategy is
// among the impossible ones, even if it does not divide the model.
LayoutCases layout_cases(const Config& config, int world_size);

// Returns the configuration under which a case runs.
Config config_of(const Config& config, const StrategyCase& strategy);

}  // namespace cadre::train
