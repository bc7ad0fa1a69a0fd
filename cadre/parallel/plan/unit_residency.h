// Simulates which units of a model are gathered at the same time, and how often each is gathered in
// a step, with the rules of UnitSchedule (parallel/fsdp/unit_schedule.h).
//
// Threads: plain functions. Blocking: never. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cadre/parallel/fsdp/options.h"

namespace cadre {

struct ResidentUnit {
  size_t parent = 0;
  int64_t full_bytes = 0;  // size of its gathered parameters
  Reshard reshard = Reshard::kAfterForward;
  bool has_trained = true;
};

struct Residency {
  int64_t peak_bytes = 0;        // all units that are gathered at the same time
  std::vector<int> num_gathers;  // by unit, in one step of the optimizer
};

struct StepShape {
  int num_prefetched = 1;
  int64_t accumulate = 1;  // backwards for one step of the optimizer; the last one reduces
};

// units: the root first, then in the order in which a forward enters them. A forward calls each
// once. Describes steps after the first, which prefetch in the observed order.
Residency residency_of(std::span<const ResidentUnit> units, const StepShape& step);

}  // namespace cadre
