// Runs one function as several ranks in the simulator.
//
// Threads: call it from one thread. Blocking: the real time in which the ranks compute; simulated
// waits take no time. Errors: see ranks.h. The failure of a rank that was killed or stopped is
// "killed" or "stopped". If a simulation cannot continue (deadlock), every rank fails. A planned
// fault that did not occur, because its time was after the end, is a failure of the run, so that a
// test does not pass without its fault.
#pragma once

#include <cstdint>

#include "cadre/core/base/export.h"
#include "cadre/core/sim/options.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {

// failures() also lists ranks that were killed or stopped, and planned faults that did not occur.
struct SimulatedRanksResult : RanksResult {
  sim::SimResult sim;
};

// All ranks are on one host unless options.ranks_per_host says otherwise. The rendezvous address is
// a unix socket if there is one host, else a TCP address of host 0.
CADRE_EXPORT SimulatedRanksResult run_ranks_in_simulator(uint64_t seed, sim::SimOptions options,
                                                         int world_size, const RankMain& rank_main);

}  // namespace cadre::testing
