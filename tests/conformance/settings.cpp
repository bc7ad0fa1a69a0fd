#include "settings.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <string_view>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/fake_backend.h"
#include "cadre/testing/core/fake_stream_backend.h"
#include "cadre/testing/core/on_host.h"
#include "cadre/testing/core/process_job.h"

namespace cadre::conformance {
namespace {

using std::chrono::hours;
using std::chrono::minutes;

// The timeout of one operation. It is so long that no correct run reaches it, even with more ranks
// than cores.
constexpr Duration kPatience = minutes(2);
constexpr char kToken[] = "token of the conformance program";

// What every rank of a group runs, and with which options.
struct GroupRun {
  CommunicatorOptions options;
  const GroupMain& group_main;
  const DeviceBackendOf& device_backend_of;
};

std::string run_rank(os::System& system, const Membership& membership, const GroupRun& run) {
  CommunicatorOptions options = run.options;
  if (run.device_backend_of) options.device_backend = run.device_backend_of(membership.rank);
  const auto group =
      Communicator::connect(system, membership, options, system.deadline_in(options.timeout));
  std::string output = run.group_main(*group);
  group->close(system.deadline_in(options.timeout));
  return output;
}

// Returns how many ranks are on each host. For TCP, each rank is on a host of its own.
std::vector<int> ranks_per_host(Engine engine, int world_size) {
  std::vector<int> numbers;
  switch (engine) {
    case Engine::kTcp:
      return std::vector<int>(static_cast<size_t>(world_size), 1);
    case Engine::kTwoHosts:
      if (world_size == 1) return {1};
      return {world_size - world_size / 2, world_size / 2};
    case Engine::kUnequalHosts:
      for (int number = 1, left = world_size; left > 0; left -= number++) {
        numbers.push_back(std::min(number, left));
      }
      return numbers;
    default:
      return {world_size};
  }
}

bool has_hosts(Engine engine) {
  return engine == Engine::kTwoHosts || engine == Engine::kUnequalHosts ||
         engine == Engine::kAlternatingHosts;
}

// Returns the pretended host of a rank that is a thread or a process.
int host_of(Engine engine, int rank, int world_size) {
  if (engine == Engine::kAlternatingHosts) return rank % 2;
  return testing::hosts_of_ranks(ranks_per_host(engine, world_size))[static_cast<size_t>(rank)];
}

// Runs `run` with the System of the rank: one that pretends to be on another host, if the setting
// has several hosts.
std::string on_host(os::System& system, Engine engine, int rank, int world_size,
                    const std::function<std::string(os::System&)>& run) {
  if (!has_hosts(engine)) return run(system);
  testing::OnHost pretended(system, host_of(engine, rank, world_size));
  return run(pretended);
}

testing::RanksResult run_threads(Engine engine, int world_size, const GroupRun& run) {
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  return testing::run_ranks_as_threads(world_size, [&](testing::RankContext& context) {
    const Membership membership{context.rank, world_size, 1, store, kToken};
    context.output = on_host(context.system, engine, context.rank, world_size,
                             [&](os::System& placed) { return run_rank(placed, membership, run); });
  });
}

testing::RanksResult run_processes(Engine engine, int world_size, const GroupRun& run) {
  return testing::run_job({.world_size = world_size, .processes = {.time_limit = minutes(20)}},
                          [&](testing::RankContext& context, const Membership& membership) {
                            context.output = on_host(context.system, engine, context.rank,
                                                     world_size, [&](os::System& placed) {
                                                       return run_rank(placed, membership, run);
                                                     });
                          });
}

// Runs the ranks in the simulator.
testing::RanksResult run_simulated(Engine engine, int world_size, uint64_t seed, GroupRun run) {
  const auto num_ranks = static_cast<size_t>(world_size);
  const std::vector<int> numbers = ranks_per_host(engine, world_size);
  const std::vector<int> hosts = testing::hosts_of_ranks(numbers);
  run.options.timeout = hours(100);  // the limit is in virtual time
  const sim::SimOptions sim_options{
      .ranks_per_host = numbers, .slow_link_probability = 0, .max_points = int64_t{1} << 40};
  sim::Simulator simulator(seed, sim_options);
  HashStore store(simulator.system(0));
  testing::RanksResult result;
  result.ranks.resize(num_ranks);
  const sim::SimResult ends = simulator.run([&](os::System& system, int rank) {
    GroupRun own = run;
    if (numbers.size() > 1) {
      own.options.listen_host = format("10.0.0.{}", hosts[static_cast<size_t>(rank)] + 1);
    }
    // The store outlives the run, so the shared pointer does not own it.
    const Membership membership{rank, world_size, 1,
                                std::shared_ptr<Store>(std::shared_ptr<void>(), &store), kToken};
    result.ranks[static_cast<size_t>(rank)].output = run_rank(system, membership, own);
  });
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    result.ranks[rank].failure = ends.failure.empty() ? ends.ranks[rank].failure : ends.failure;
  }
  return result;
}

}  // namespace

std::string Setting::to_string() const {
  constexpr std::array<std::string_view, 7> kEngines = {
      "host", "tcp", "fake", "fake stream", "two hosts", "unequal hosts", "alternating hosts"};
  constexpr std::array<std::string_view, 3> kHomes = {"processes", "threads", "simulator"};
  return format("{}, {}", kEngines[static_cast<size_t>(engine)], kHomes[static_cast<size_t>(home)]);
}

int Setting::order_of_additions() const {
  // The host engine and the engines of tests add in rank order.
  const bool is_by_rank =
      engine == Engine::kHost || engine == Engine::kFake || engine == Engine::kFakeStream;
  return is_by_rank ? -1 : static_cast<int>(engine);
}

testing::RanksResult run_group(const Setting& setting, int world_size, uint64_t seed,
                               const GroupMain& group_main,
                               const DeviceBackendOf& device_backend_of) {
  GroupRun run{.options = {}, .group_main = group_main, .device_backend_of = device_backend_of};
  CommunicatorOptions& options = run.options;
  options.timeout = kPatience;
  switch (setting.engine) {
    case Engine::kHost:
      options.transport = TransportChoice::kSharedMemory;
      break;
    case Engine::kTcp:
      options.transport = TransportChoice::kTcp;
      break;
    case Engine::kFake:
      options.backend = testing::fake_backend(std::make_shared<testing::RanksInProcess>());
      break;
    case Engine::kFakeStream:
      options.backend = testing::fake_stream_backend(std::make_shared<testing::RanksInProcess>());
      break;
    case Engine::kTwoHosts:
    case Engine::kUnequalHosts:
    case Engine::kAlternatingHosts:
      options.listen_host = "127.0.0.1";
      break;
  }
  switch (setting.home) {
    case Home::kProcesses:
      return run_processes(setting.engine, world_size, run);
    case Home::kThreads:
      return run_threads(setting.engine, world_size, run);
    case Home::kSimulator:
      return run_simulated(setting.engine, world_size, seed, run);
  }
  return {};
}

}  // namespace cadre::conformance
