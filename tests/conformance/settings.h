// The settings in which the conformance program runs: ranks as processes, as threads or in the
// simulator; over shared memory, over TCP, on several hosts, or with the engines of tests.
//
// Threads: must be called while the process has no other thread. Blocking: until all ranks have
// ended. Lifetime: no process or file remains. Errors: returned as a text for each rank.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>

#include "cadre/core/comm/communicator.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::conformance {

enum class Home { kProcesses, kThreads, kSimulator };

// The last three are the hierarchical engine. kTwoHosts divides the ranks into halves,
// kUnequalHosts places 1, 2, 3, ... ranks on the hosts, and with kAlternatingHosts neighbours are
// on different hosts.
enum class Engine { kHost, kTcp, kFake, kFakeStream, kTwoHosts, kUnequalHosts, kAlternatingHosts };

struct Setting {
  Home home = Home::kThreads;
  Engine engine = Engine::kHost;

  // Settings with equal numbers add in the same order, so their results have the same bits.
  int order_of_additions() const;
  std::string to_string() const;  // such as "host, processes"
};

// The fake engines connect only ranks that are threads of one process. In the simulator each host
// has consecutive ranks.
inline constexpr std::array<Setting, 16> kSettings = {{
    {Home::kProcesses, Engine::kHost},
    {Home::kProcesses, Engine::kTcp},
    {Home::kThreads, Engine::kHost},
    {Home::kThreads, Engine::kTcp},
    {Home::kThreads, Engine::kFake},
    {Home::kThreads, Engine::kFakeStream},
    {Home::kSimulator, Engine::kHost},
    {Home::kSimulator, Engine::kTcp},
    {Home::kSimulator, Engine::kFake},
    {Home::kSimulator, Engine::kFakeStream},
    {Home::kProcesses, Engine::kTwoHosts},
    {Home::kThreads, Engine::kTwoHosts},
    {Home::kThreads, Engine::kUnequalHosts},
    {Home::kThreads, Engine::kAlternatingHosts},
    {Home::kSimulator, Engine::kTwoHosts},
    {Home::kSimulator, Engine::kUnequalHosts},
}};

// The function that each rank runs. Its result becomes the output of the rank.
using GroupMain = std::function<std::string(Communicator& group)>;

// Returns the engine for memory of the rank's device.
using DeviceBackendOf = std::function<DeviceBackend(Rank rank)>;

// `seed` is the seed of the simulator. If `device_backend_of` is null, the group works on memory of
// the CPU only; it is called in the rank's thread.
testing::RanksResult run_group(const Setting& setting, int world_size, uint64_t seed,
                               const GroupMain& group_main,
                               const DeviceBackendOf& device_backend_of = nullptr);

}  // namespace cadre::conformance
