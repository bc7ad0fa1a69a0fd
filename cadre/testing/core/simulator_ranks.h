// Runs one function as several ranks of a simulation.
//
// Threads: call from one thread. Blocking: in real time, for as long as the ranks compute. Errors:
// see ranks.h. The failure of a rank that was killed or stopped is "killed" or "stopped". If a
// simulation does not end by itself (deadlock), every rank fails.
#pragma once

#include "cadre/core/sim/simulator.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {

struct SimulatedRanksResult : RanksResult {
  sim::SimResult sim;
};

// By default all ranks are on one host, where they connect through a unix socket. If
// options.ranks_per_host puts them on several hosts, they connect to a TCP address of host 0.
SimulatedRanksResult run_ranks_in_simulator(uint64_t seed, sim::SimOptions options, int world_size,
                                            const RankMain& rank_main);

}  // namespace cadre::testing
