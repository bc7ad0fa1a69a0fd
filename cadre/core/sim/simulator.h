// Runs ranks in virtual time, with threads in a seeded order, a seeded network and planned faults.
//
// Code that waits and talks through os::System runs here unchanged; the same seed gives the same
// run, told by the hash of its history. Memory is sequentially consistent here: what hardware may
// reorder is ThreadSanitizer's to find, on real threads.
//
// Threads: one owner. Blocking: run(), in real time for as long as the ranks compute.
// Lifetime: what the ranks made through their Systems is gone before the Simulator.
// Errors: a rank's exceptions come back as text; a deadlock or an endless run as
// SimResult::failure. Source: the idea of FoundationDB's simulation (Zhou et al., SIGMOD 2021) with
// blocking threads in place of coroutines.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/os/system.h"
#include "cadre/core/sim/options.h"

namespace cadre::sim {

struct World;
class SimulatedSystem;

struct RankEnd {
  enum class Kind { kReturned, kThrew, kKilled, kStopped };

  Kind kind = Kind::kReturned;
  std::string failure;     // for kThrew: "kCode: message"
  TimePoint at;            // when its main function ended
  int64_t num_points = 0;  // scheduling points it came to
};

// A planned fault when it struck; also one that nobody felt.
struct Strike {
  FaultKind kind;
  TimePoint at;
};

struct SimResult {
  std::vector<RankEnd> ranks;
  FaultCounts faults;
  std::vector<Strike> strikes;
  std::vector<std::string> history;
  uint64_t history_hash = 0;
  std::string failure;  // empty, or why the simulation was ended before the ranks
};

class Simulator {
 public:
  // Throws Error(kInvalidArgument) for options without a rank or faults that name none.
  Simulator(uint64_t seed, SimOptions options);
  ~Simulator();

  int num_ranks() const { return static_cast<int>(systems_.size()); }
  os::System& system(int rank);

  // Runs every rank's main function to its end. Once per Simulator.
  SimResult run(const std::function<void(os::System& system, int rank)>& rank_main);
  // A rank dies now, as by Fault::kill. Called by a rank while run() runs them.
  void kill(int rank);

 private:
  void run_rank(int rank, const std::function<void(os::System&, int)>& rank_main, RankEnd& end);
  void plan_faults();
  void strike(const Fault& fault);
  void plan_end(const Fault& fault);

  std::unique_ptr<World> world_;
  std::vector<std::unique_ptr<SimulatedSystem>> systems_;
  std::vector<Strike> strikes_;
};

}  // namespace cadre::sim
