// Runs ranks in virtual time: threads in a seeded order, a seeded network and planned faults.
//
// Code that waits and communicates through os::System runs here unchanged; the same seed gives the
// same run and the same hash of its history. Memory is sequentially consistent here, so the
// simulator cannot find errors that need reordering by the hardware; run ThreadSanitizer on real
// threads for those.
//
// Threads: one owner. Blocking: run(), in real time for as long as the ranks compute.
// Lifetime: objects that the ranks made through their Systems must be destroyed before the
// Simulator. Errors: a rank's exceptions are returned as text; a deadlock or an endless run as
// SimResult::failure. Source: the idea of FoundationDB's simulation (Zhou et al., SIGMOD 2021) with
// blocking threads in place of coroutines.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/os/system.h"
#include "cadre/core/sim/options.h"

namespace cadre::sim {

struct World;
class SimulatedSystem;

struct RankEnd {
  enum class Kind { kReturned, kThrew, kKilled, kStopped };

  Kind kind = Kind::kReturned;
  std::string failure;     // is set for kThrew, as "kCode: message"
  TimePoint at;            // the time at which the rank's main function ended
  int64_t num_points = 0;  // the number of scheduling points of the rank
};

// A planned fault that was carried out, even if it had no effect.
struct Strike {
  FaultKind kind;
  TimePoint at;
};

struct SimResult {
  std::vector<RankEnd> ranks;
  FaultCounts faults;
  std::vector<Strike> strikes;
  // A text for each planned fault that did not occur, such as "kill rank 1 at point 200 of rank 1:
  // rank 1 ended after 75 points"; empty if the simulation was ended before the ranks.
  std::vector<std::string> missed_faults;
  std::vector<std::string> history;
  uint64_t history_hash = 0;
  std::string failure;  // says why the simulation was ended before the ranks; else empty
};

class CADRE_EXPORT Simulator {
 public:
  // Throws Error(kInvalidArgument) if the options have no rank, or a fault names a rank or host
  // that does not exist.
  Simulator(uint64_t seed, SimOptions options);
  ~Simulator();

  int num_ranks() const { return static_cast<int>(systems_.size()); }
  os::System& system(int rank);
  // Returns the numeric address at which other hosts reach the rank's host: "10.0.0.1" for host 0.
  std::string host_address(int rank) const;

  // Runs every rank's main function to its end. Called once for each Simulator.
  SimResult run(const std::function<void(os::System& system, int rank)>& rank_main);
  // Kills a rank now, like Fault::kill. Called by a rank during run().
  void kill(int rank);

 private:
  void run_rank(int rank, const std::function<void(os::System&, int)>& rank_main, RankEnd& end);
  void plan_faults();
  // Returns whether the fault had a target: a rank that has ended cannot be killed or stopped.
  bool strike(const Fault& fault);
  std::vector<std::string> missed_faults(const std::vector<RankEnd>& ranks) const;
  void plan_end(const Fault& fault);

  std::unique_ptr<World> world_;
  std::vector<std::unique_ptr<SimulatedSystem>> systems_;
  std::vector<Strike> strikes_;
  std::vector<bool> has_struck_;  // one entry for each fault of the options
};

}  // namespace cadre::sim
