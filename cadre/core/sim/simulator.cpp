#include "cadre/core/sim/simulator.h"

#include <numeric>

#include "cadre/core/base/format.h"
#include "cadre/core/sim/simulated_system.h"

namespace cadre::sim {
namespace {

std::string describe(const Fault& fault) {
  switch (fault.kind) {
    case FaultKind::kKill:
    case FaultKind::kStop:
    case FaultKind::kContinue:
      return cadre::format("{} rank {}", to_string(fault.kind), fault.a);
    case FaultKind::kCut:
      return cadre::format("cut ranks {} and {}", fault.a, fault.b);
    default:
      return cadre::format("{} hosts {} and {}", to_string(fault.kind), fault.a, fault.b);
  }
}

// Returns whether the fault affects one process, not a link.
bool is_of_rank(const Fault& fault) {
  return fault.kind == FaultKind::kKill || fault.kind == FaultKind::kStop ||
         fault.kind == FaultKind::kContinue;
}

void check_fault(const Fault& fault, int num_ranks, int num_hosts) {
  const bool is_of_hosts = fault.kind == FaultKind::kPartition || fault.kind == FaultKind::kHeal;
  const bool is_planned = is_of_hosts || is_of_rank(fault) || fault.kind == FaultKind::kCut;
  const int bound = is_of_hosts ? num_hosts : num_ranks;
  const bool may_last = fault.kind == FaultKind::kPartition || fault.kind == FaultKind::kStop;
  const bool fits = (may_last || !fault.duration) && fault.a >= 0 && fault.a < bound &&
                    fault.b >= 0 && fault.b < bound;
  if (is_planned && fits) return;
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("fault \"{}\" cannot be planned with {} ranks on {} hosts",
                            describe(fault), num_ranks, num_hosts));
}

}  // namespace

Simulator::Simulator(uint64_t seed, SimOptions options) {
  const std::vector<int>& per_host = options.ranks_per_host;
  const int num_ranks = std::accumulate(per_host.begin(), per_host.end(), 0);
  if (num_ranks < 1) {
    throw Error(ErrorCode::kInvalidArgument, "a simulation needs at least one rank on one host");
  }
  for (const Fault& fault : options.faults) {
    check_fault(fault, num_ranks, static_cast<int>(per_host.size()));
  }
  world_ = std::make_unique<World>(seed, std::move(options), num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    systems_.push_back(std::make_unique<SimulatedSystem>(*world_, rank));
  }
}

Simulator::~Simulator() = default;

os::System& Simulator::system(int rank) {
  return *systems_[static_cast<size_t>(rank)];
}

std::string Simulator::host_address(int rank) const {
  return address_of_host(world_->network.host_of(rank));
}

SimResult Simulator::run(const std::function<void(os::System& system, int rank)>& rank_main) {
  SimResult result;
  result.ranks.resize(systems_.size());
  for (int rank = 0; rank < num_ranks(); ++rank) {
    RankEnd& end = result.ranks[static_cast<size_t>(rank)];
    world_->scheduler.add_thread(rank, "main", [&, rank] { run_rank(rank, rank_main, end); });
  }
  plan_faults();
  world_->scheduler.run();
  result.faults = world_->counts;
  result.history = world_->scheduler.history().lines();
  result.history_hash = world_->scheduler.history().hash();
  result.failure = world_->scheduler.failure();
  result.strikes = strikes_;
  if (result.failure.empty()) result.missed_faults = missed_faults(result.ranks);
  return result;
}

void Simulator::run_rank(int rank, const std::function<void(os::System&, int)>& rank_main,
                         RankEnd& end) {
  Scheduler& scheduler = world_->scheduler;
  try {
    rank_main(system(rank), rank);
  } catch (const Killed&) {
    end.kind = RankEnd::Kind::kKilled;
  } catch (const Error& error) {
    end.kind = RankEnd::Kind::kThrew;
    end.failure = cadre::format("{}: {}", to_string(error.code()), error.message());
  } catch (const std::exception& error) {
    end.kind = RankEnd::Kind::kThrew;
    end.failure = cadre::format("exception: {}", error.what());
  } catch (...) {
    end.kind = RankEnd::Kind::kThrew;
    end.failure = "an exception that is no std::exception";
  }
  if (scheduler.is_killed(rank)) {
    end.kind = scheduler.is_stopped(rank) ? RankEnd::Kind::kStopped : RankEnd::Kind::kKilled;
    end.failure.clear();
  }
  end.at = scheduler.now();
  end.num_points = scheduler.num_points(rank);
  // The simulated process ends here, and with it its remaining threads and sockets.
  scheduler.kill(rank);
  world_->network.end_rank(rank);
}

void Simulator::kill(int rank) {
  strike(Fault::kill(rank, {}));
}

void Simulator::plan_faults() {
  const std::vector<Fault>& faults = world_->options.faults;
  has_struck_.assign(faults.size(), false);
  for (size_t i = 0; i < faults.size(); ++i) {
    if (!faults[i].when.time) continue;
    world_->scheduler.at(*faults[i].when.time,
                         [this, &fault = faults[i], i] { has_struck_[i] = strike(fault); });
  }
  world_->scheduler.on_point([this, &faults](int rank, int64_t point) {
    for (size_t i = 0; i < faults.size(); ++i) {
      const When& when = faults[i].when;
      if (!when.time && when.rank == rank && when.point == point) {
        has_struck_[i] = strike(faults[i]);
      }
    }
  });
}

std::vector<std::string> Simulator::missed_faults(const std::vector<RankEnd>& ranks) const {
  std::vector<std::string> missed;
  for (size_t i = 0; i < has_struck_.size(); ++i) {
    if (has_struck_[i]) continue;
    const Fault& fault = world_->options.faults[i];
    std::string text = describe(fault);
    std::string reason = is_of_rank(fault) ? cadre::format("rank {} had ended", fault.a)
                                           : std::string("all ranks had ended");
    if (fault.when.time) {
      text += cadre::format(" at {:g} ms", static_cast<double>(fault.when.time->ns) / 1e6);
    } else {
      const int rank = fault.when.rank;
      const bool exists = rank >= 0 && rank < num_ranks();
      const int64_t num_points = exists ? ranks[static_cast<size_t>(rank)].num_points : 0;
      text += cadre::format(" at point {} of rank {}", fault.when.point, rank);
      if (num_points < fault.when.point) {
        reason = cadre::format("rank {} ended after {} points", rank, num_points);
      }
    }
    missed.push_back(text + ": " + reason);
  }
  return missed;
}

bool Simulator::strike(const Fault& fault) {
  Scheduler& scheduler = world_->scheduler;
  // A rank that has ended counts as killed, so this fault has no effect.
  if (is_of_rank(fault) && scheduler.is_killed(fault.a)) return false;
  scheduler.history().add(scheduler.now(), "fault", describe(fault));
  strikes_.push_back({fault.kind, scheduler.now()});
  switch (fault.kind) {
    case FaultKind::kKill:
      scheduler.kill(fault.a);
      world_->network.end_rank(fault.a);
      world_->counts.add(FaultKind::kKill);
      break;
    case FaultKind::kStop:
      scheduler.stop(fault.a);
      world_->counts.add(FaultKind::kStop);
      break;
    case FaultKind::kContinue:
      if (scheduler.is_stopped(fault.a)) world_->counts.add(FaultKind::kContinue);
      scheduler.resume(fault.a);
      break;
    case FaultKind::kCut:
      world_->network.cut(fault.a, fault.b);
      break;
    case FaultKind::kPartition:
      world_->network.partition(fault.a, fault.b);
      break;
    default:
      world_->network.heal(fault.a, fault.b);
      break;
  }
  if (fault.duration) plan_end(fault);
  return true;
}

void Simulator::plan_end(const Fault& fault) {
  Fault end = fault;
  end.kind = fault.kind == FaultKind::kPartition ? FaultKind::kHeal : FaultKind::kContinue;
  end.duration.reset();
  Scheduler& scheduler = world_->scheduler;
  scheduler.at(scheduler.now() + *fault.duration, [this, end] { strike(end); });
}

}  // namespace cadre::sim
