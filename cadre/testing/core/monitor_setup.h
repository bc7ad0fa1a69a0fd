// Makes the setup of a Monitor (the failure detection of a group) for tests: a group without a
// shared status page and without a flight record.
#pragma once

#include <memory>
#include <vector>

#include "cadre/core/comm/failure/monitor.h"
#include "cadre/testing/core/plane_job.h"

namespace cadre::testing {

// Returns the setup of rank 0 in a group of all ranks.
inline MonitorSetup setup_of(int world_size, ControlPlane* plane) {
  const auto num_ranks = static_cast<size_t>(world_size);
  return {.roster = {"world", 0,
                     std::make_shared<const Layout>(std::vector<wire::RankAddress>(num_ranks)),
                     all_ranks(world_size)},
          .key = 1,
          .plane = plane,
          .slots = std::vector<int>(num_ranks, -1),
          .record_path = "",
          .log = nullptr};
}

}  // namespace cadre::testing
