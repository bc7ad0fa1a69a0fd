// Runs one function as several ranks of a simulation.
//
// Threads: call from one thread. Blocking: in real time, for as long as the ranks compute. Errors:
// see ranks.h. The failure of a rank that was killed or stopped is "killed" or "stopped". If a
// simulation does not end by itself (deadlock), every rank fails.
#pragma once

#include <cstdint>

#include "cadre/core/base/export.h"
#include "cadre/core/sim/options.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {

// failures() names the ranks that were killed or stopped, too.
struct SimulatedRanksResult : RanksResult {
  sim::SimResult sim;
};

// All ranks are on one host unless options.ranks_per_host says otherwise. On one host they meet at
// a unix address, else at a TCP address of host 0.
CADRE_EXPORT SimulatedRanksResult run_ranks_in_simulator(uint64_t seed, sim::SimOptions options,
                                                         int world_size, const RankMain& rank_main);

}  // namespace cadre::testing
