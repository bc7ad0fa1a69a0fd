// Computes which units of FullyShardedDataParallel are gathered at the same time, and how often, by
// running its UnitSchedule (parallel/fsdp/unit_schedule.h) with units that only count their memory.
//
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cadre/parallel/fsdp/options.h"

namespace cadre {

struct ResidentUnit {
  size_t parent = 0;
  int64_t full_bytes = 0;  // the bytes of the gathered parameters
  Reshard reshard = Reshard::kAfterForward;
  bool has_trained = true;
  bool has_frozen = false;
};

struct Residency {
  // The maximum, over a step, of the bytes of all units that are gathered at the same time.
  int64_t peak_bytes = 0;
  // num_gathers[unit]: how often the unit is gathered in one optimizer step.
  std::vector<int> num_gathers;
  // How often the ranks compare which unit they use (use_comparison.h), in one optimizer step.
  int num_comparisons = 0;
};

struct StepShape {
  int num_prefetched = 1;
  // The number of backwards for each optimizer step; the last one reduces gradients.
  int64_t accumulate = 1;
};

// units: the root, and then the others in the order in which a forward calls them; each is called
// once. The counts are those of a step in which the order of the units is already known, so that
// units are prefetched.
Residency residency_of(std::span<const ResidentUnit> units, const StepShape& step);

}  // namespace cadre
