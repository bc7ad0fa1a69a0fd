// Runs a job of processes in which a rank is killed or stopped inside an operation of the world, of
// a subgroup, or of two groups at once, in the memory of the caller's choice. Every survivor must
// throw an error that names the rank within the guaranteed time. The same processes then rebuild
// the group, and no process, thread or file may be leaked.
//
// Threads: call expect_named_failure() from a process with no other thread. Blocking: until all
// processes have ended. Errors: failures of the test.
#pragma once

#include <signal.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/comm/communicator.h"
#include "tests/conformance/collectives.h"

namespace cadre::failures {

// The rank that causes the failure of another one, and the one that only sees it, as ranks of the
// group.
inline constexpr int kKiller = 0;
inline constexpr int kVictim = 1;
inline constexpr int kWitness = 2;

// The engines of the groups: the host engine, the net engine, and the hierarchical engine on two
// pretended hosts.
enum class Engine { kHost, kTcp, kTwoHosts };

inline std::string_view to_string(Engine engine) {
  return engine == Engine::kHost ? "host" : engine == Engine::kTcp ? "tcp" : "two_hosts";
}

// The groups in which the operation under test runs.
enum class Place { kWorld, kSubgroup, kTwoGroups };

struct Case {
  OpKind kind;
  Engine engine;
  int signal;
  Place place = Place::kWorld;

  // The ranks outside of the subgroup have the lowest numbers, so that a rank has different numbers
  // in the subgroup and in the world.
  int num_outsiders() const { return place == Place::kWorld ? 0 : 1; }
  // Two ranks of the world are on host 0. So in the world the victim shares its host with the
  // killer, and in the subgroup with the witness.
  std::optional<int> host_of(Rank world_rank) const {
    return engine == Engine::kTwoHosts ? std::optional(world_rank.value / 2) : std::nullopt;
  }
  // Returns the beginning of what a rank of the group that finds the failure says about the last
  // operation of the victim. A rank on another host knows it only if it has asked, which the killer
  // does.
  std::string_view seen_from(int rank) const {
    const bool is_near = host_of(rank + num_outsiders()) == host_of(kVictim + num_outsiders());
    return is_near || rank == kKiller ? "last seen in " : "";
  }
  CommunicatorOptions options() const {
    CommunicatorOptions options;
    if (engine == Engine::kTcp) options.transport = TransportChoice::kTcp;
    if (engine == Engine::kTwoHosts) options.listen_host = "127.0.0.1";
    return options;
  }
};

// The memory in which the collectives run.
struct Memory {
  conformance::RunCall run_call = conformance::run_on_cpu;
  // Called first in each rank's process, before its resources are counted.
  std::function<void(Rank)> prepare = [](Rank) {};
  std::function<std::optional<DeviceBackend>(Rank)> device_backend = [](Rank) {
    return std::nullopt;
  };
};

std::string name_of(const Case& test);
// Returns all combinations of these operations, all engines and both signals.
std::vector<Case> cases_of(std::span<const OpKind> kinds, Place place);

void expect_named_failure(const Case& test, const Memory& memory = {});

}  // namespace cadre::failures
