// The results of a verification, by strategy.
//
// Threads: plain values, the same on all ranks. Blocking: never. Errors: none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"

namespace cadre {

// The difference from the reference that uses the largest share of its bound, over all elements and
// ranks. Steps count up to the first one that exceeds a bound, because later differences follow
// from that one. Differences and bounds are relative to the largest absolute value of the
// reference's tensor (see VerifyBounds for gradients), or to the reference's loss.
struct Deviation {
  double difference = 0;  // NaN if a value is NaN
  double bound = 0;       // bound of this element
  std::string name;       // name of the parameter; empty for a loss
  int64_t step = 0;       // counted from 1; 0 if no value was compared
  int rank = 0;           // the rank that has found it

  // Returns false for NaN.
  CADRE_EXPORT bool is_within() const;
};

struct StrategyReport {
  std::string strategy;  // the result of name_of() for the case
  Deviation loss;
  Deviation gradients;  // compared before the update
  Deviation parameters;
  Deviation buffers = {};  // compared after the update, if the module has any
  // Why the strategy could not train the model to the end; empty if it did. The deviations above
  // are then those of the steps before the error.
  std::string error;
  // Why this case cannot run with this model, batch and number of ranks; empty if it ran. If this
  // is set, no value was compared.
  std::string not_run = {};

  // Returns false also if the case has failed or was not run, or if no value was compared.
  CADRE_EXPORT bool is_within() const;
};

// A case that was not selected, and that could run after a small change of the program.
struct NearCase {
  std::string strategy;
  std::string reason;  // why it cannot run at present
  std::string change;  // the change that would make it run, such as "model.layers=6"
};

struct VerifyReport {
  int world_size = 1;
  int64_t num_steps = 0;
  std::vector<StrategyReport> strategies;
  int num_not_selected = 0;  // the number of cases that the caller's selection has left out
  std::vector<NearCase> near = {};

  // Returns whether there is at least one strategy, and every strategy has run and is within its
  // bounds.
  CADRE_EXPORT bool is_within() const;
  // Returns a table with a line for each strategy, and one for each deviation.
  CADRE_EXPORT std::string to_text() const;
};

}  // namespace cadre
