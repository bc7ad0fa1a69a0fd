// Runs one function as several ranks of this process, each with a ProcessGroup of all of them: as
// threads, or in the simulator.
//
// Threads: one for each rank, in which torch computes with one thread. Blocking: until all ranks
// have ended; every operation ends within RunGroupsOptions::timeout. Errors: an exception of a rank
// is returned in its result. A rank that finds a wrong result throws (require()), which destroys
// its group, so that the other ranks fail at once and do not wait for it. If the function returns
// normally, the group is closed.
#pragma once

#include <ATen/Parallel.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "cadre/core/base/log.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/sim/options.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/simulator_ranks.h"

namespace cadre::testing {

struct RunGroupsOptions {
  Duration timeout = kRankTimeout;    // the time limit of connecting and of each operation
  std::shared_ptr<LogSink> log = {};  // the log of all groups; if null, no messages are kept
  TransportChoice transport = TransportChoice::kAuto;  // kTcp: not through shared memory
};

// The function that each rank runs. What it writes to `output` is returned to the test in
// RankOutcome::output.
using GroupMain = std::function<void(const ProcessGroup& group, std::string& output)>;

// Runs `body` on one rank: connects the group of all ranks, runs `body`, and closes the group.
inline void run_group_of_rank(RankContext& context, const GroupMain& body,
                              const RunGroupsOptions& options) {
  at::set_num_threads(1);
  const ProcessGroup group(connect_ranks(
      context, {.timeout = options.timeout, .transport = options.transport, .log = options.log},
      options.timeout));
  body(group, context.output);
  group.close();
}

// Runs `body` on all ranks as threads of this process.
inline RanksResult run_groups(int world_size, const GroupMain& body,
                              const RunGroupsOptions& options = {}) {
  return run_ranks_as_threads(
      world_size, [&](RankContext& context) { run_group_of_rank(context, body, options); });
}

// Runs a body without output on all ranks as threads of this process.
inline RanksResult run_groups(int world_size, const std::function<void(const ProcessGroup&)>& body,
                              const RunGroupsOptions& options = {}) {
  return run_groups(
      world_size, [&](const ProcessGroup& group, std::string&) { body(group); }, options);
}

// Runs the ranks in virtual time, with a thread order, network and faults that are determined by
// the seed and `simulation`, so a failure can be reproduced with its seed. The body must block only
// in calls of Cadre: with a thread of its own, a sleep, or a lock that is held during a collective,
// the simulation would hang. Timeouts expire in virtual time, so without real waiting.
inline SimulatedRanksResult run_groups_in_simulator(uint64_t seed, sim::SimOptions simulation,
                                                    int world_size, const GroupMain& body,
                                                    const RunGroupsOptions& options = {}) {
  return run_ranks_in_simulator(seed, std::move(simulation), world_size, [&](RankContext& context) {
    run_group_of_rank(context, body, options);
  });
}

// Runs a body without output in the simulator.
inline SimulatedRanksResult run_groups_in_simulator(
    uint64_t seed, sim::SimOptions simulation, int world_size,
    const std::function<void(const ProcessGroup&)>& body, const RunGroupsOptions& options = {}) {
  return run_groups_in_simulator(
      seed, std::move(simulation), world_size,
      [&](const ProcessGroup& group, std::string&) { body(group); }, options);
}

}  // namespace cadre::testing
