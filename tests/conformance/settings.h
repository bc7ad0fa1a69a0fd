// Where the ranks of the conformance program run: as processes, as threads or in the simulator,
// over shared memory or over TCP.
//
// Threads: call from a process with no other thread. Blocking: until all ranks have ended.
// Lifetime: nothing is left behind. Errors: as text, rank by rank.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>

#include "cadre/comm/communicator.h"
#include "cadre/testing/ranks.h"

namespace cadre::conformance {

enum class Home { kProcesses, kThreads, kSimulator };

struct Setting {
  Home home = Home::kThreads;
  TransportChoice transport = TransportChoice::kSharedMemory;

  bool is_tcp() const { return transport == TransportChoice::kTcp; }
  std::string to_string() const;  // "host, processes"
};

inline constexpr std::array<Setting, 6> kSettings = {{
    {Home::kProcesses, TransportChoice::kSharedMemory},
    {Home::kProcesses, TransportChoice::kTcp},
    {Home::kThreads, TransportChoice::kSharedMemory},
    {Home::kThreads, TransportChoice::kTcp},
    {Home::kSimulator, TransportChoice::kSharedMemory},
    {Home::kSimulator, TransportChoice::kTcp},
}};

// What the rank returns comes back as its output.
using GroupMain = std::function<std::string(Communicator& group)>;

// `seed` is the simulator's.
testing::RanksResult run_group(const Setting& setting, int world_size, uint64_t seed,
                               const GroupMain& group_main);

}  // namespace cadre::conformance
