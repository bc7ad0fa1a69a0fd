// Runs the UnitSchedule of FullyShardedDataParallel (parallel/fsdp/unit_schedule.h) over units
// whose memory is only counted.
//
// Threads: plain functions. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cadre/parallel/fsdp/options.h"

namespace cadre {

struct ResidentUnit {
  size_t parent = 0;
  int64_t full_bytes = 0;  // the bytes that a gather takes from the pool
  Reshard reshard = Reshard::kAfterForward;
  bool has_trained = true;
  bool has_frozen = false;
};

struct Residency {
  // The largest sum of the sizes of units that are gathered at the same time.
  int64_t peak_bytes = 0;
  // Has for each unit the number of gathers in one step of the optimizer.
  std::vector<int> num_gathers;
  int num_comparisons = 0;  // how often, in one step, the ranks compare which unit they use
};

struct StepShape {
  int num_prefetched = 1;
  // The number of backwards per step of the optimizer; the last one reduces.
  int64_t accumulate = 1;
};

// units: the root first, then in the order in which a forward enters them. A forward calls each
// once. The counts of one step are those of a step after the first ones, which prefetches in the
// observed order.
Residency residency_of(std::span<const ResidentUnit> units, const StepShape& step);

}  // namespace cadre
