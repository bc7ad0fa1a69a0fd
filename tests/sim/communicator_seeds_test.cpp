// Tests the whole Communicator in virtual time with many seeds. Each seed determines a job (its
// ranks, 2 to 4 by default; shared memory or TCP; one host or several; collectives and messages),
// an order of events, and one fault at a random time.
//
// Every run has delays, reordering, short sends and receives, spurious wake-ups and slow links. A
// rank "ends right" if all its results are right. "Names" means that its error names the culprit.
// Only these outcomes of a fault are allowed:
// - no fault, a partition that heals, a stop that continues: every rank ends right.
// - kill of v: the others end right, or with kPeerLost that names v.
// - cut between a and b: a ends right or names b, b ends right or names a, the others end right or
// name a or b.
// - partition of hosts A and B: a rank on A or B ends right or names a rank on the other host, the
// others end right or name a rank on A or B.
// - stop of v: the others end right or name v.
//
// CADRE_SIM_SEEDS sets the number of seeds for each kind of fault (default 200), CADRE_TEST_SEED
// the only seed, CADRE_SIM_MAX_RANKS the largest number of ranks (default 4); `make seeds` runs
// many.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <iostream>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/testing/core/seeds.h"
#include "simulated_job.h"
#include "verdict.h"

namespace cadre::testing {
namespace {

using sim::Fault;
using sim::FaultKind;
using sim::When;
using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;

enum class Scenario { kNoFault, kKill, kCut, kPartition, kHeal, kStop, kContinue };

std::string_view to_string(Scenario scenario) {
  constexpr std::array<std::string_view, 7> kNames = {"NoFault", "Kill", "Cut",     "Partition",
                                                      "Heal",    "Stop", "Continue"};
  return kNames[static_cast<size_t>(scenario)];
}

// Counts for each kind of fault in how many runs it had an effect.
class FaultTable {
 public:
  void add(const sim::FaultCounts& counts) {
    ++num_runs_;
    for (int kind = 0; kind < sim::kNumFaultKinds; ++kind) {
      if (counts.of(static_cast<FaultKind>(kind)) > 0) ++felt_[static_cast<size_t>(kind)];
    }
  }
  void expect_felt(std::span<const FaultKind> kinds) const {
    for (const FaultKind kind : kinds) {
      expect_a_tenth(felt_[static_cast<size_t>(kind)], sim::to_string(kind));
    }
  }
  // Expects that `num_runs` is at least a tenth of all runs, by default 20 of 200.
  void expect_a_tenth(int num_runs, std::string_view what) const {
    if (num_runs_ == 1) return;  // a run with a given seed replays a single job
    EXPECT_GE(num_runs * 10, num_runs_) << what << " was in too few of " << num_runs_ << " runs";
  }
  void print(std::string_view title) const {
    std::cout << format("{}: felt in how many of {} runs:", title, num_runs_);
    for (int kind = 0; kind < sim::kNumFaultKinds; ++kind) {
      std::cout << format("{} {} {}", kind == 0 ? "" : ",",
                          sim::to_string(static_cast<FaultKind>(kind)),
                          felt_[static_cast<size_t>(kind)]);
    }
    std::cout << std::endl;
  }

 private:
  int num_runs_ = 0;
  std::array<int, sim::kNumFaultKinds> felt_{};
};

constexpr std::array kAllShapes = {Shape::kSharedMemory, Shape::kTcpOnOneHost, Shape::kHostEach,
                                   Shape::kTwoHosts};
constexpr std::array kSeveralHosts = {Shape::kHostEach, Shape::kTwoHosts};

bool ends_right(Scenario scenario) {
  return scenario == Scenario::kNoFault || scenario == Scenario::kHeal ||
         scenario == Scenario::kContinue;
}

// Returns the kinds of faults that must have an effect in a tenth of the runs. Spurious wake-ups
// exist only in shared memory, because only there ranks wait for words in memory.
std::vector<FaultKind> faults_of(Scenario scenario) {
  std::vector<FaultKind> kinds = {FaultKind::kDelay, FaultKind::kReorder, FaultKind::kShortIo,
                                  FaultKind::kSlowLink};
  switch (scenario) {
    case Scenario::kNoFault:
      kinds.push_back(FaultKind::kSpuriousWake);
      break;
    case Scenario::kKill:
      kinds.push_back(FaultKind::kKill);
      break;
    case Scenario::kCut:
      kinds.push_back(FaultKind::kCut);
      break;
    case Scenario::kPartition:
      kinds.push_back(FaultKind::kPartition);
      break;
    case Scenario::kHeal:
      kinds.insert(kinds.end(), {FaultKind::kPartition, FaultKind::kHeal});
      break;
    case Scenario::kStop:
      kinds.push_back(FaultKind::kStop);
      break;
    case Scenario::kContinue:
      kinds.insert(kinds.end(), {FaultKind::kStop, FaultKind::kContinue});
      break;
  }
  return kinds;
}

// Returns the time of a fault: anywhere in the lifetime of a rank or, in half of the runs, near its
// end, when operations are running.
When moment_of(const JobPlan& plan, int rank, Random& random) {
  const JobOutcome undisturbed = run_job(plan);
  const auto life =
      static_cast<uint64_t>(undisturbed.sim.ranks[static_cast<size_t>(rank)].num_points);
  const uint64_t early = random.below(2) == 0 ? 0 : life / 2;
  return When::at_point(rank, static_cast<int64_t>(1 + early + random.below(life - early)));
}

// Returns a time that is shorter than every deadline, also that of a connection attempt.
Duration short_time(Random& random) {
  constexpr std::array<int, 5> kTimesMs = {5, 50, 500, 2'000, 4'000};
  return milliseconds(kTimesMs[random.below(kTimesMs.size())]);
}

Fault fault_of(Scenario scenario, const JobPlan& plan) {
  Random random(plan.seed ^ 0xfa017);
  const auto world = static_cast<uint64_t>(plan.world_size);
  const int a = static_cast<int>(random.below(world));
  const When when = moment_of(plan, a, random);
  const int b = (a + 1 + static_cast<int>(random.below(world - 1))) % plan.world_size;
  const int host = plan.host_of(a);
  const auto num_hosts = static_cast<uint64_t>(plan.options.ranks_per_host.size());
  const int other_host = static_cast<int>(
      (static_cast<uint64_t>(host) + 1 + random.below(std::max<uint64_t>(num_hosts - 1, 1))) %
      num_hosts);
  switch (scenario) {
    case Scenario::kKill:
      return Fault::kill(a, when);
    case Scenario::kCut:
      return Fault::cut(a, b, when);
    case Scenario::kPartition:
      return Fault::partition(host, other_host, when);
    case Scenario::kHeal:
      return Fault::partition(host, other_host, when).lasting(short_time(random));
    case Scenario::kContinue:
      return Fault::stop(a, when).lasting(short_time(random));
    default:
      return Fault::stop(a, when);
  }
}

JobPlan plan_of(Scenario scenario, uint64_t seed) {
  const bool needs_hosts = scenario == Scenario::kPartition || scenario == Scenario::kHeal;
  JobPlan plan = needs_hosts ? plan_job(seed, kSeveralHosts) : plan_job(seed, kAllShapes);
  // Every rank must end right in this scenario. With naps this long a lost wake-up causes a
  // timeout, and the test fails.
  if (ends_right(scenario)) plan.options.max_nap = hours(1);
  if (scenario != Scenario::kNoFault) plan.options.faults = {fault_of(scenario, plan)};
  return plan;
}

// Returns whether the error of `rank` may name rank `named` as the culprit.
bool may_blame(const JobPlan& plan, int rank, int named) {
  const Fault& fault = plan.options.faults.front();
  if (fault.kind == FaultKind::kKill || fault.kind == FaultKind::kStop) return named == fault.a;
  const bool is_of_hosts = fault.kind == FaultKind::kPartition;
  const int here = is_of_hosts ? plan.host_of(rank) : rank;
  const int there = is_of_hosts ? plan.host_of(named) : named;
  if (here == fault.a) return there == fault.b;
  if (here == fault.b) return there == fault.a;
  return there == fault.a || there == fault.b;
}

bool says(const RankReport& report, std::string_view text) {
  return report.failure && report.failure->message().find(text) != std::string::npos;
}

// Returns whether the rank's failure names a culprit that the table above allows, not counting the
// exceptions of is_hidden().
bool failed_justly(const JobPlan& plan, const JobOutcome& outcome, int rank) {
  if (!outcome.ranks[static_cast<size_t>(rank)].failure) return false;
  const Verdict verdict = verdict_of(outcome, rank);
  return verdict.culprit && may_blame(plan, verdict.reporter, *verdict.culprit);
}

// Returns whether the rank may name another rank than the table allows, because the fault has
// hidden the true cause from it. It may name:
// - a rank that never joined the group, because the victim did not let it finish connecting;
// - a rank that had left this group, because another group had failed on it for an allowed reason;
// - a rank that ended in good order, if only the stopped rank could forward its leave;
// - in a partition, a rank that is itself waiting, if messages or a second group are in the chain
// of waiting ranks: if a rank has several operations in flight, the others see only one of them,
// which is not always the one that is blocked.
bool is_hidden(const JobPlan& plan, const JobOutcome& outcome, int rank, const Verdict& verdict) {
  const RankReport& own = outcome.ranks[static_cast<size_t>(rank)];
  const RankReport& named = outcome.ranks[static_cast<size_t>(*verdict.culprit)];
  if (named.was_connecting() && *verdict.culprit != verdict.reporter) return true;
  const FaultKind fault = plan.options.faults.front().kind;
  if (says(own, "left the group") && named.failure && named.failed_at <= own.failed_at) {
    return failed_justly(plan, outcome, *verdict.culprit);
  }
  if (says(own, "cannot be reached any more")) return fault == FaultKind::kStop && named.is_right();
  const bool waits = says(own, ": last seen in ");
  const bool has_message = says(own, "send #") || says(own, "recv #");
  const bool waits_elsewhere = says(own, ", now in ");
  return fault == FaultKind::kPartition && named.failure &&
         ((waits && has_message) || waits_elsewhere);
}

// Returns whether the failure names an allowed culprit. The error of the rank that detected the
// failure is checked, because the other ranks quote it.
bool is_just(const JobPlan& plan, const JobOutcome& outcome, int rank) {
  const Verdict verdict = verdict_of(outcome, rank);
  // Another group failed first. This rank threw that failure and destroyed this group.
  if (says(outcome.ranks[static_cast<size_t>(rank)], "ended the group's scope")) {
    return verdict.reporter != rank && failed_justly(plan, outcome, verdict.reporter);
  }
  return failed_justly(plan, outcome, rank) ||
         (verdict.culprit && is_hidden(plan, outcome, rank, verdict));
}

// Returns whether the failure was reported in time. A death must be noticed at once, and a cut
// connection at its next use. A silent rank is noticed at the deadline of an operation, which may
// have begun a little later if earlier data went over a slow link.
bool is_in_time(const JobPlan& plan, const JobOutcome& outcome, const RankReport& report) {
  constexpr Duration kAtOnce = seconds(2);
  constexpr Duration kLater = seconds(5);
  const FaultKind kind = plan.options.faults.front().kind;
  const bool is_loud = kind == FaultKind::kKill || kind == FaultKind::kCut;
  const TimePoint began = report.was_connecting() ? TimePoint{} : outcome.sim.strikes.front().at;
  const bool has_deadline = !is_loud || report.was_connecting();
  const Duration more = has_deadline              ? kJobTimeout + kLater
                        : kind == FaultKind::kCut ? kLater
                                                  : Duration(0);
  return report.failed_at <= began + kAtOnce + more;
}

class Seeds : public ::testing::TestWithParam<Scenario> {
 protected:
  static void expect_as_the_table_says(const JobPlan& plan, const JobOutcome& outcome) {
    ASSERT_EQ(outcome.sim.failure, "");
    if (ends_right(GetParam())) {
      ASSERT_TRUE(outcome.all_right());
      return;
    }
    for (int rank = 0; rank < plan.world_size; ++rank) {
      const RankReport& report = outcome.ranks[static_cast<size_t>(rank)];
      const bool has_returned =
          outcome.sim.ranks[static_cast<size_t>(rank)].kind == sim::RankEnd::Kind::kReturned;
      // Skips the victim, and ranks whose results were right.
      if (!has_returned || !report.failure) continue;
      EXPECT_TRUE(is_just(plan, outcome, rank))
          << "rank " << rank << " blames a rank that it may not blame";
      EXPECT_TRUE(is_in_time(plan, outcome, report)) << "rank " << rank << " was late";
      const bool is_kill = plan.options.faults.front().kind == FaultKind::kKill;
      if (is_kill && !verdict_of(outcome, rank).is_connecting) {
        EXPECT_EQ(report.failure->code(), ErrorCode::kPeerLost);
      }
    }
  }
  // Returns whether any rank failed inside an operation.
  static bool failed_in_an_operation(const JobOutcome& outcome) {
    return std::ranges::any_of(outcome.ranks, [](const RankReport& report) {
      return report.failure && !report.was_connecting();
    });
  }
};

TEST_P(Seeds, EndAsTheTruthTableSays) {
  FaultTable table;
  int num_failed = 0;
  for (const uint64_t seed : simulator_seeds()) {
    const JobPlan plan = plan_of(GetParam(), seed);
    const JobOutcome outcome = run_job(plan);
    const Fault fault = plan.options.faults.empty() ? Fault() : plan.options.faults.front();
    SCOPED_TRACE(format("seed {}, {}, fault at {} and {}{}", seed, to_string(plan.shape), fault.a,
                        fault.b, outcome.describe()));
    expect_as_the_table_says(plan, outcome);
    if (HasFatalFailure()) return;
    table.add(outcome.sim.faults);
    if (failed_in_an_operation(outcome)) ++num_failed;
  }
  table.print(to_string(GetParam()));
  table.expect_felt(faults_of(GetParam()));
  if (!ends_right(GetParam())) table.expect_a_tenth(num_failed, "a failure of an operation");
}

TEST_P(Seeds, AReplayGivesTheSameHistory) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    const JobPlan plan = plan_of(GetParam(), seed);
    const JobOutcome first = run_job(plan);
    const JobOutcome second = run_job(plan);
    EXPECT_EQ(first.sim.history_hash, second.sim.history_hash) << "seed " << seed;
    EXPECT_EQ(first.describe(), second.describe()) << "seed " << seed;
    JobPlan other = plan;
    other.seed += 1000;
    EXPECT_NE(first.sim.history_hash, run_job(other).sim.history_hash) << "seed " << seed;
  }
}

// Stops one rank at each point of its first steps, on two hosts of two ranks. Ranks of its host may
// still be connecting while those of the other host run operations.
TEST(SimulatedJobs, ARankThatIsStoppedWhileItConnectsIsNamedByAll) {
  constexpr int kVictim = 1;
  constexpr std::array kShape = {Shape::kTwoHosts};
  JobPlan plan = plan_job(1, kShape, 4);
  int num_connecting = 0;
  for (int64_t point = 1; point <= 150; ++point) {
    plan.options.faults = {Fault::stop(kVictim, When::at_point(kVictim, point))};
    const JobOutcome outcome = run_job(plan);
    SCOPED_TRACE(format("stopped at point {}{}", point, outcome.describe()));
    for (int rank = 0; rank < plan.world_size; ++rank) {
      const RankReport& report = outcome.ranks[static_cast<size_t>(rank)];
      if (rank == kVictim || !report.failure) continue;
      EXPECT_TRUE(is_just(plan, outcome, rank)) << "rank " << rank << " blames another rank";
      num_connecting += report.was_connecting() ? 1 : 0;
    }
  }
  EXPECT_GT(num_connecting, 0);
}

TEST(SimulatedJobs, EveryKindOfStepIsInATenthOfThem) {
  std::array<int, Step::kNumKinds> num_jobs_with{};
  const std::vector<uint64_t> seeds = simulator_seeds();
  for (const uint64_t seed : seeds) {
    std::array<bool, Step::kNumKinds> is_in{};
    for (const Step& step : plan_job(seed, kAllShapes).program.steps) {
      is_in[static_cast<size_t>(step.kind)] = true;
    }
    for (size_t kind = 0; kind < is_in.size(); ++kind) num_jobs_with[kind] += is_in[kind] ? 1 : 0;
  }
  if (seeds.size() < 100) return;  // with so few seeds not every effect need occur
  for (size_t kind = 0; kind < num_jobs_with.size(); ++kind) {
    EXPECT_GE(num_jobs_with[kind] * 10, static_cast<int>(seeds.size()))
        << to_string(static_cast<Step::Kind>(kind)) << " occurs in too few of the jobs";
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, Seeds,
                         ::testing::Values(Scenario::kNoFault, Scenario::kKill, Scenario::kCut,
                                           Scenario::kPartition, Scenario::kHeal, Scenario::kStop,
                                           Scenario::kContinue),
                         [](const auto& scenario) {
                           return std::string(to_string(scenario.param));
                         });

}  // namespace
}  // namespace cadre::testing
