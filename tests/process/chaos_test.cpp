// Runs rounds of random operations while ranks are killed, stopped or delayed at random, and checks
// each result against a formula. Survivors rebuild the group and continue, while tensors of earlier
// groups are still in memory. Each world has one to four subgroups, each of which divides the ranks
// by random colours. Often operations of two subgroups are in flight at once, and every second rank
// issues them in the reverse order. The test fails for hangs, for wrong results, and for leaked
// processes, descriptors, threads, mappings and files in /dev/shm.
//
// CADRE_CHAOS_ROUNDS sets the number of rounds (default 200); CADRE_CHAOS_MINUTES sets the duration
// instead. CADRE_CHAOS_SEED determines the first job: its worlds, engines, operations, faults and
// their times. The seed of each job determines the seed of the next one. A job that fails prints
// its seed; with this value of CADRE_CHAOS_SEED the test runs that job first.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <iostream>
#include <set>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/core/collective/reduction_table.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/os/native/monotonic_clock.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_job.h"
#include "tests/conformance/cases.h"
#include "tests/conformance/collectives.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;
using conformance::Case;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::RankContext;
using testing::require;

constexpr int kRoundsPerJob = 100;
// The number of floats; so many that the reduction works in place.
constexpr size_t kCount = 40'000;
// The time limit of connecting. If a rank is killed before it connects, the others wait for it
// until this limit.
constexpr Duration kConnectTime = milliseconds(1500);
constexpr Duration kRejoinTime = seconds(4);
// The timeout of every operation. A rank that is stopped longer than this is treated as lost.
constexpr Duration kTimeout = seconds(1);
// A job that takes longer than this is regarded as hanging, whatever faults it has.
constexpr Duration kJobTime = seconds(90);
constexpr size_t kNumKept = 3;  // the number of buffers of earlier groups that stay in use
constexpr Duration kProgressTime = seconds(10);

uint64_t from_environment(const char* name, uint64_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr ? fallback : std::strtoull(text, nullptr, 10);
}

// One rank of a job is killed, stopped permanently, or stopped for a moment.
struct Fault {
  enum class Kind { kKill, kStop, kDelay };
  Kind kind;
  int rank;
  Duration wait;  // the time since the previous fault
};

// A job of 2 to 5 ranks, of which at least one survives.
struct JobPlan {
  uint64_t seed;
  int world_size;
  TransportChoice transport;
  std::vector<Fault> faults;

  std::string describe() const {
    return format("job of seed {}: {} ranks, {}, {} faults", seed, world_size,
                  transport == TransportChoice::kTcp ? "tcp" : "shared memory", faults.size());
  }
};

JobPlan make_plan(uint64_t seed) {
  Random random(seed);
  JobPlan plan{.seed = seed,
               .world_size = 2 + static_cast<int>(random.below(4)),
               .transport = random.below(2) == 0 ? TransportChoice::kAuto : TransportChoice::kTcp,
               .faults = {}};
  std::vector<int> victims;
  for (int rank = 0; rank < plan.world_size; ++rank) victims.push_back(rank);
  const auto num_faults = 1 + random.below(static_cast<uint64_t>(plan.world_size) - 1);
  for (uint64_t i = 0; i < num_faults; ++i) {
    const auto at = static_cast<ptrdiff_t>(random.below(victims.size()));
    const uint64_t dice = random.below(5);
    const auto kind = dice < 3   ? Fault::Kind::kKill
                      : dice < 4 ? Fault::Kind::kStop
                                 : Fault::Kind::kDelay;
    const auto wait = milliseconds(5 + random.below(60));
    plan.faults.push_back({kind, victims[static_cast<size_t>(at)], wait});
    victims.erase(victims.begin() + at);
  }
  return plan;
}

// Returns the cases of a round, equal on all ranks of a world. Pairs of dtype and reduction that
// give an error are left out.
std::vector<Case> cases_of(int world_size) {
  std::vector<Case> cases = conformance::cases_for(world_size);
  std::erase_if(cases, [](const Case& c) {
    return conformance::collectives()[c.collective].has_op && !check_reduction(c.dtype, c.op).ok();
  });
  return cases;
}

// A rank of a job. It runs rounds in one group and, after each failure, in a rebuilt group.
class Survivor {
 public:
  Survivor(RankContext& context, Membership membership, const JobPlan& plan)
      : context_(context), membership_(std::move(membership)), plan_(plan) {}

  void live() {
    while (round_ < kRoundsPerJob) {
      std::unique_ptr<Communicator> group;
      try {
        group = testing::connect(context_, membership_,
                                 {.timeout = kTimeout, .transport = plan_.transport}, kConnectTime);
        run_rounds(*group);
        close_subgroups();
        group->close(context_.system.deadline_in(seconds(5)));
      } catch (const Error& error) {
        require(error.code() != ErrorCode::kInternal, error.message());
        require(error.code() != ErrorCode::kInvalidArgument, error.message());
        require(error.code() != ErrorCode::kCorruption, error.message());
        subgroups_.clear();
        rejoin_without(group == nullptr ? std::vector<Rank>() : group->lost_ranks());
      }
    }
    context_.output = format("{} rebuilt", num_rebuilds_);
  }

 private:
  void run_rounds(Communicator& group) {
    agree_on_round(group);
    buffers_.push_back(group.allocate_symmetric(kCount * sizeof(float)));
    if (buffers_.size() > kNumKept) buffers_.pop_front();
    make_subgroups(group);
    const std::vector<Case> cases = cases_of(group.world_size());
    for (; round_ < kRoundsPerJob; ++round_) {
      Random random(plan_.seed + static_cast<uint64_t>(round_));
      switch (random.below(8)) {
        case 0:
        case 1:
          sum_in_place(group);
          break;
        case 2:
        case 3:
          sum_in_two_subgroups(random);
          break;
        case 4: {
          Communicator& subgroup = *subgroups_[random.below(subgroups_.size())];
          const std::vector<Case> theirs = cases_of(subgroup.world_size());
          run_case(subgroup, theirs[random.below(theirs.size())]);
          break;
        }
        default:
          run_case(group, cases[random.below(cases.size())]);
      }
      touch_old_memory();
    }
  }

  void run_case(Communicator& group, const Case& c) {
    const conformance::CollectiveEntry& entry = conformance::collectives()[c.collective];
    const int world_size = group.world_size();
    const auto brought = [&](uint64_t count) {
      return conformance::numbers(c, group.rank(), world_size, 0, count);
    };
    const std::vector<std::byte> result = entry.run({group, conformance::run_on_cpu}, c, brought);
    if (result == entry.expected(c, group.rank(), world_size)) return;
    throw Error(ErrorCode::kInternal, format("wrong result of {} on {} ranks in round {}",
                                             c.to_string(), world_size, round_));
  }

  void sum_in_place(Communicator& group) {
    const Bytes bytes = buffers_.back()->local();
    const std::span<float> values(reinterpret_cast<float*>(bytes.data()), kCount);
    const auto value_of = [&](size_t i) {
      return static_cast<float>((i + static_cast<size_t>(round_)) % 97);
    };
    const auto mine = static_cast<float>(group.rank().value + 1);
    for (size_t i = 0; i < kCount; ++i) values[i] = mine * value_of(i);
    group.all_reduce(bytes, bytes, DType::kFloat32, ReduceOp::kSum);
    const int world = group.world_size();
    const auto factor = static_cast<float>(world * (world + 1) / 2);
    for (size_t i = 0; i < kCount; ++i) {
      if (values[i] == factor * value_of(i)) continue;
      throw Error(ErrorCode::kInternal, format("wrong sum in round {} at {}: {} instead of {}",
                                               round_, i, values[i], factor * value_of(i)));
    }
  }

  // Makes the subgroups. All ranks of the world must pass the same arguments, except for the
  // colours.
  void make_subgroups(Communicator& group) {
    subgroups_.clear();
    Random random(plan_.seed + static_cast<uint64_t>(group.world_size()));
    const uint64_t num_subgroups = 1 + random.below(4);
    for (uint64_t i = 0; i < num_subgroups; ++i) {
      const uint64_t colors = random.below(uint64_t{1} << group.world_size());
      const int color = static_cast<int>(colors >> group.rank().value & 1);
      subgroups_.push_back(split(group, {.color = color}, context_.system.deadline_in(kTimeout)));
    }
  }

  void close_subgroups() {
    for (const auto& subgroup : subgroups_) {
      subgroup->close(context_.system.deadline_in(seconds(5)));
    }
    subgroups_.clear();
  }

  // Sums in two subgroups at once. Each rank contributes its rank in the world plus one.
  void sum_in_two_subgroups(Random& random) {
    const std::array<size_t, 2> chosen = {random.below(subgroups_.size()),
                                          random.below(subgroups_.size())};
    // The buffers are shared with the operations: if one group fails, the other one's operation may
    // still use its buffer.
    std::array<std::shared_ptr<std::vector<int64_t>>, 2> values;
    std::vector<Work> works;
    // All ranks must call operations of one group in the same order, but the order between the two
    // groups may differ.
    const Rank me = subgroups_.front()->global_rank(subgroups_.front()->rank());
    const bool is_reversed = chosen[0] != chosen[1] && (me.value + round_) % 2 == 1;
    for (size_t i = 0; i < chosen.size(); ++i) {
      const size_t at = is_reversed ? chosen.size() - 1 - i : i;
      values[at] = std::make_shared<std::vector<int64_t>>(kCount / 4, me.value + 1);
      const Bytes bytes = std::as_writable_bytes(std::span(*values[at]));
      works.push_back(subgroups_[chosen[at]]->all_reduce_async(
          bytes, bytes, DType::kInt64, ReduceOp::kSum, {.keep_alive = values[at]}));
    }
    for (const Work& work : works) work.wait();
    for (size_t i = 0; i < chosen.size(); ++i) {
      int64_t expected = 0;
      for (const Rank rank : subgroups_[chosen[i]]->global_ranks()) expected += rank.value + 1;
      const bool is_right =
          std::ranges::all_of(*values[i], [expected](int64_t value) { return value == expected; });
      require(is_right, format("a sum of a subgroup in round {}", round_));
    }
  }

  // Survivors may be one round apart, so all of them continue with the earliest round that a
  // survivor has reached.
  void agree_on_round(Communicator& group) {
    int64_t round = round_;
    const Bytes bytes = std::as_writable_bytes(std::span(&round, 1));
    group.all_reduce(bytes, bytes, DType::kInt64, ReduceOp::kMin);
    round_ = static_cast<int>(round);
  }

  void touch_old_memory() {
    for (size_t i = 0; i + 1 < buffers_.size(); ++i) {
      buffers_[i]->local()[0] = static_cast<std::byte>(round_);
      require(buffers_[i]->local()[0] == static_cast<std::byte>(round_),
              "another rank has written to memory of an earlier group");
    }
  }

  void rejoin_without(const std::vector<Rank>& lost) {
    membership_ =
        rejoin(context_.system, membership_, lost, context_.system.deadline_in(kRejoinTime))
            .value_or_throw();
    ++num_rebuilds_;
  }

  RankContext& context_;
  Membership membership_;
  const JobPlan& plan_;
  int round_ = 0;
  int num_rebuilds_ = 0;
  std::deque<std::shared_ptr<SymmetricBuffer>> buffers_;
  std::vector<std::unique_ptr<Communicator>> subgroups_;
};

struct Tally {
  uint64_t num_jobs = 0;
  uint64_t num_rounds = 0;
  uint64_t num_killed = 0;
  uint64_t num_stopped = 0;
  uint64_t num_delayed = 0;
  uint64_t num_rebuilt = 0;

  std::string describe() const {
    return format("{} jobs, {} rounds, {} ranks killed, {} stopped, {} delayed, {} groups rebuilt",
                  num_jobs, num_rounds, num_killed, num_stopped, num_delayed, num_rebuilt);
  }
};

// Applies the faults of the plan. Ranks that are still stopped are killed at the end, long after
// the others have continued without them.
void disturb(os::System& system, const JobPlan& plan, std::span<const int> pids) {
  const auto pid_of = [&](const Fault& fault) { return pids[static_cast<size_t>(fault.rank)]; };
  bool has_stopped = false;
  for (const Fault& fault : plan.faults) {
    testing::nap(system, fault.wait);
    ::kill(pid_of(fault), fault.kind == Fault::Kind::kKill ? SIGKILL : SIGSTOP);
    has_stopped = has_stopped || fault.kind == Fault::Kind::kStop;
    if (fault.kind != Fault::Kind::kDelay) continue;
    testing::nap(system, milliseconds(20));
    ::kill(pid_of(fault), SIGCONT);
  }
  if (has_stopped) testing::nap(system, kTimeout + seconds(2));
  for (const Fault& fault : plan.faults) {
    if (fault.kind == Fault::Kind::kStop) ::kill(pid_of(fault), SIGKILL);
  }
}

void run_job_under_faults(const JobPlan& plan, Tally& tally) {
  const auto system = os::make_native_system();
  testing::JobOptions options{.world_size = plan.world_size};
  options.processes.time_limit = kJobTime;
  options.processes.disturb = [&](std::span<const int> pids) { disturb(*system, plan, pids); };
  const auto result = testing::run_job(options, [&](RankContext& context, const Membership& m) {
    const testing::Resources before = testing::count_resources();
    { Survivor(context, m, plan).live(); }
    const std::string left = testing::leftovers_since(before);
    require(left.empty(), left);
  });
  int num_rebuilt = 0;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    const auto& outcome = result.ranks[static_cast<size_t>(rank)];
    const auto fault = std::ranges::find(plan.faults, rank, &Fault::rank);
    const bool may_die = fault != plan.faults.end() && fault->kind != Fault::Kind::kDelay;
    // A rank may have ended before its fault was due, so only real kills are counted.
    if (may_die && outcome.signal == SIGKILL) {
      ++(fault->kind == Fault::Kind::kKill ? tally.num_killed : tally.num_stopped);
      continue;
    }
    EXPECT_EQ(outcome.failure, "") << "rank " << rank << "; " << plan.describe();
    num_rebuilt = std::max(num_rebuilt, std::atoi(outcome.output.c_str()));
  }
  tally.num_delayed += static_cast<uint64_t>(std::ranges::count(
      plan.faults, Fault::Kind::kDelay, [](const Fault& fault) { return fault.kind; }));
  tally.num_rebuilt += static_cast<uint64_t>(num_rebuilt);
  tally.num_rounds += kRoundsPerJob;
  ++tally.num_jobs;
}

std::set<std::string> shared_files() {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator("/dev/shm")) names.insert(entry.path().string());
  return names;
}

// Returns new files in /dev/shm that stay for a while. Files of other programs on this machine
// appear and disappear.
std::string shared_files_since(const std::set<std::string>& before) {
  const auto system = os::make_native_system();
  const Deadline patience = system->deadline_in(seconds(5));
  while (true) {
    std::string left;
    for (const std::string& file : shared_files()) {
      if (!before.contains(file)) left += file + "; ";
    }
    if (left.empty() || patience.has_passed(system->now())) return left;
    testing::nap(*system, milliseconds(100));
  }
}

TEST(Chaos, SurvivorsOfRandomFaultsKeepTheRightResultsAndLeaveNothing) {
  const auto minutes = from_environment("CADRE_CHAOS_MINUTES", 0);
  const auto rounds = from_environment("CADRE_CHAOS_ROUNDS", 200);
  uint64_t seed = from_environment("CADRE_CHAOS_SEED", 20261121);
  std::cout << "seed " << seed << ", "
            << (minutes > 0 ? format("{} minutes", minutes) : format("{} rounds", rounds))
            << std::endl;
  const testing::Resources before = testing::count_resources();
  const std::set<std::string> files_before = shared_files();
  const TimePoint start = os::monotonic_now();
  TimePoint told = start;
  Tally tally;
  const auto is_over = [&](TimePoint now) {
    return minutes > 0 ? now - start >= std::chrono::minutes(minutes) : tally.num_rounds >= rounds;
  };
  for (TimePoint now = start; !is_over(now) && !HasFailure(); now = os::monotonic_now()) {
    run_job_under_faults(make_plan(seed), tally);
    ASSERT_EQ(testing::leftovers_since(before), "") << make_plan(seed).describe();
    if (now - told >= kProgressTime) {
      told = now;
      std::cout << format("{} s: {}; last job's seed {}", (now - start).count() / 1'000'000'000,
                          tally.describe(), seed)
                << std::endl;
    }
    seed = Random(seed).next();
  }
  std::cout << tally.describe() << std::endl;
  EXPECT_GT(tally.num_killed + tally.num_stopped, 0U);
  EXPECT_GT(tally.num_rebuilt, 0U);
  EXPECT_EQ(shared_files_since(files_before), "");
}

}  // namespace
}  // namespace cadre
