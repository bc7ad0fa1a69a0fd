// The results of a verification, by strategy.
//
// Threads: plain values, the same on all ranks. Blocking: never. Errors: none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cadre/base/export.h"

namespace cadre {

// The difference from the reference with the largest ratio to its bound, over all elements and
// ranks, and over the steps up to the first that exceeds a bound, because later differences follow
// from it. Differences and bounds are relative: to the largest absolute value of the reference's
// tensor (of a gradient: see VerifyBounds), or to the reference's loss.
struct Deviation {
  double difference = 0;  // NaN if a value is NaN
  double bound = 0;       // of this element
  std::string name;       // of the parameter; empty for a loss
  int64_t step = 0;       // from 1; 0: nothing was compared
  int rank = 0;           // the rank that has found it

  // False for NaN.
  CADRE_EXPORT bool is_within() const;
};

struct StrategyReport {
  std::string strategy;  // name_of(StrategyCase)
  Deviation loss;
  Deviation gradients;  // before the update
  Deviation parameters;
  // Why the strategy could not train the model to the end; empty if it did. The deviations are
  // those of the earlier steps.
  std::string error;

  CADRE_EXPORT bool is_within() const;
};

struct VerifyReport {
  int world_size = 1;
  int64_t num_steps = 0;
  std::vector<StrategyReport> strategies;

  // Whether every strategy has trained the model within its bounds.
  CADRE_EXPORT bool is_within() const;
  // A table with a line for each strategy, and one for each deviation.
  CADRE_EXPORT std::string to_text() const;
};

}  // namespace cadre
