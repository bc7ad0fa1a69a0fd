// Runs one function as several ranks of this process, each with a ProcessGroup of all of them: as
// threads, or in the simulator.
//
// Threads: one for each rank, in which torch computes with one thread. Blocking: until all ranks
// have ended; every operation of a rank ends within its timeout. Errors: what a rank throws is
// returned with its rank. A rank that finds a wrong result throws (require()): then its group is
// destroyed, and the other ranks end at once instead of waiting for it. The group is closed when
// the function returns.
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
  Duration timeout = kRankTimeout;    // limit of connecting and of each operation
  std::shared_ptr<LogSink> log = {};  // log of all groups; null: messages are dropped
  TransportChoice transport = TransportChoice::kAuto;  // kTcp: not through shared memory
};

// The function of a rank, and the text that the rank returns to the test in RankOutcome::output.
using GroupMain = std::function<void(const ProcessGroup& group, std::string& output)>;

// Runs `body` on one rank of a run, with a group of all of them.
inline void run_group_of_rank(RankContext& context, const GroupMain& body,
                              const RunGroupsOptions& options) {
  at::set_num_threads(1);
  const ProcessGroup group(connect_ranks(
      context, {.timeout = options.timeout, .transport = options.transport, .log = options.log},
      options.timeout));
  body(group, context.output);
  group.close();
}

// All ranks are threads of this process.
inline RanksResult run_groups(int world_size, const GroupMain& body,
                              const RunGroupsOptions& options = {}) {
  return run_ranks_as_threads(
      world_size, [&](RankContext& context) { run_group_of_rank(context, body, options); });
}

// Does the same for a body that writes no output.
inline RanksResult run_groups(int world_size, const std::function<void(const ProcessGroup&)>& body,
                              const RunGroupsOptions& options = {}) {
  return run_groups(
      world_size, [&](const ProcessGroup& group, std::string&) { body(group); }, options);
}

// Runs the ranks in virtual time, in an order of threads and with a network and faults that the
// seed and `simulation` determine: a failure is repeated by its seed. The body must wait only in
// calls of Cadre: a thread of its own, a sleep or a lock that is held during a collective stops
// the simulation. A timeout passes in virtual time, so at once.
inline SimulatedRanksResult run_groups_in_simulator(uint64_t seed, sim::SimOptions simulation,
                                                    int world_size, const GroupMain& body,
                                                    const RunGroupsOptions& options = {}) {
  return run_ranks_in_simulator(seed, std::move(simulation), world_size, [&](RankContext& context) {
    run_group_of_rank(context, body, options);
  });
}

}  // namespace cadre::testing
