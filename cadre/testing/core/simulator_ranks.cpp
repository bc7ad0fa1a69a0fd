#include "cadre/testing/core/simulator_ranks.h"

#include <memory>

#include "cadre/core/base/format.h"
#include "cadre/core/store/hash_store.h"

namespace cadre::testing {
namespace {

constexpr uint16_t kRendezvousPort = 29500;

std::string describe(const sim::RankEnd& end) {
  switch (end.kind) {
    case sim::RankEnd::Kind::kReturned:
      return "";
    case sim::RankEnd::Kind::kThrew:
      return end.failure;
    case sim::RankEnd::Kind::kKilled:
      return "killed";
    case sim::RankEnd::Kind::kStopped:
      return "stopped";
  }
  return "unknown end";
}

}  // namespace

SimulatedRanksResult run_ranks_in_simulator(uint64_t seed, sim::SimOptions options, int world_size,
                                            const RankMain& rank_main) {
  if (options.ranks_per_host.empty()) options.ranks_per_host = {world_size};
  const size_t num_hosts = options.ranks_per_host.size();
  const os::Address address = num_hosts == 1
                                  ? os::Address{os::Address::Kind::kUnix, "cadre-test", 0}
                                  : os::Address{os::Address::Kind::kTcp, "node0", kRendezvousPort};
  sim::Simulator simulator(seed, std::move(options));
  if (simulator.num_ranks() != world_size) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("run_ranks_in_simulator: SimOptions::ranks_per_host has {} ranks in "
                              "total, but world_size is {}; pass equal numbers",
                              simulator.num_ranks(), world_size));
  }
  const bool has_hosts = num_hosts > 1;
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  SimulatedRanksResult result;
  result.ranks.resize(static_cast<size_t>(world_size));
  result.sim = simulator.run([&](os::System& system, int rank) {
    RankContext context{system,
                        rank,
                        world_size,
                        address,
                        {},
                        store,
                        has_hosts ? simulator.host_address(rank) : std::string()};
    rank_main(context);
    result.ranks[static_cast<size_t>(rank)].output = std::move(context.output);
  });
  for (const std::string& missed : result.sim.missed_faults) {
    result.failure += cadre::format(
        "{}a planned fault did not occur: {}; plan it earlier, for example at half of "
        "sim.ranks[r].num_points or sim.ranks[r].at of a run without faults",
        result.failure.empty() ? "" : "\n", missed);
  }
  for (size_t rank = 0; rank < result.ranks.size(); ++rank) {
    result.ranks[rank].failure =
        result.sim.failure.empty() ? describe(result.sim.ranks[rank]) : result.sim.failure;
  }
  return result;
}

}  // namespace cadre::testing
