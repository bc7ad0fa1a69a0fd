// The System of one simulated rank.
//
// Threads: the main thread of its rank and the threads that it spawned, one at a time. Blocking: in
// virtual time. Lifetime: the simulation's World outlives it.
#pragma once

#include "cadre/core/base/random.h"
#include "cadre/core/os/native/segment.h"
#include "cadre/core/os/system.h"
#include "cadre/core/sim/network.h"
#include "cadre/core/sim/options.h"
#include "cadre/core/sim/scheduler.h"
#include "cadre/core/sim/sleeping_threads.h"

namespace cadre::sim {

// The state that all ranks of a simulation share.
struct World {
  World(uint64_t seed, SimOptions sim_options, int num_ranks);

  const uint64_t seed;
  const SimOptions options;
  FaultCounts counts;
  Scheduler scheduler;
  Network network;
  SleepingThreads words;
  os::SegmentTable segments;
};

class SimulatedSystem final : public os::System {
 public:
  SimulatedSystem(World& world, int rank);

  TimePoint now() override { return world_.scheduler.now_for_caller(); }
  os::HostInfo host() override;
  std::unique_ptr<os::Thread> spawn(std::string name, std::function<void()> body) override;
  std::unique_ptr<os::Waiter> make_waiter() override;
  int spin_limit() override { return 0; }
  void yield() override { world_.scheduler.yield(); }
  bool wait_while(os::WaitWord& word, uint32_t old, Deadline deadline) override;
  void publish(os::WaitWord& word, uint32_t value) override;
  void wake(os::WaitWord& word) override;
  bool poll(std::span<os::PollItem> items, Deadline deadline) override;
  Result<std::unique_ptr<os::Listener>> listen(const os::Address& address) override;
  Result<std::unique_ptr<os::Socket>> connect(const os::Address& address,
                                              Deadline deadline) override;
  std::unique_ptr<os::Event> make_event() override;
  Result<std::unique_ptr<os::SharedMemory>> create_segment(size_t num_bytes) override;
  void random_bytes(Bytes out) override;

 private:
  World& world_;
  const int rank_;
  // Used by random_bytes() only, so that its calls do not change the order in which threads run.
  Random random_;
};

}  // namespace cadre::sim
