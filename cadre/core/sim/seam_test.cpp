// A test of the os::System interface: two small all_reduces, a ring over sockets and a flat one
// over shared memory, use only os::System. They run unchanged on threads, on processes and in the
// simulator, with a kill at every scheduling point (docs/decisions/0001-one-seam-for-waiting.md).
#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <chrono>
#include <numeric>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/core/simulator_ranks.h"

namespace cadre::testing {
namespace {

using os::Address;
using os::Socket;
using os::System;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr size_t kNumValues = 60;  // divisible by 2, 3 and 4, the numbers of ranks
constexpr size_t kMaxRanks = 4;
using Values = std::array<double, kNumValues>;

// Deliberate defects in the test's all_reduces, which the simulator must find.
struct Planted {
  bool forgets_to_wake = false;
  bool ignores_short_sends = false;
};

void wait_for(System& system, os::PollItem item, Deadline deadline) {
  if (system.poll(std::span(&item, 1), deadline)) return;
  throw Error(ErrorCode::kTimeout, "the peer was silent until the deadline");
}

// Returns the address at which `rank` listens: a unix name derived from the rendezvous address, or
// an address on the rank's own host.
Address address_of(const RankContext& context, int rank, std::string_view purpose) {
  Address address = context.rendezvous_address;
  if (address.kind == Address::Kind::kUnix) {
    address.host += cadre::format("-{}-{}", purpose, rank);
  } else {
    address.host = cadre::format("node{}", rank);
  }
  return address;
}

std::unique_ptr<Socket> connect(System& system, const Address& address, Deadline deadline) {
  for (;;) {
    auto socket = system.connect(address, deadline);
    if (socket.ok() || socket.error().code() != ErrorCode::kUnavailable ||
        deadline.has_passed(system.now())) {
      return std::move(socket).value_or_throw();
    }
    system.make_waiter()->park(system.deadline_in(milliseconds(1)).earlier(deadline));
  }
}

std::unique_ptr<Socket> accept(System& system, os::Listener& listener, Deadline deadline) {
  for (;;) {
    if (auto socket = listener.try_accept().value_or_throw()) return socket;
    wait_for(system, {&listener, true}, deadline);
  }
}

class Ring {
 public:
  Ring(RankContext& context, Planted planted, Deadline deadline)
      : context_(context), planted_(planted) {
    System& system = context.system;
    const int next = (context.rank + 1) % context.world_size;
    const auto listener = system.listen(address_of(context, context.rank, "ring")).value_or_throw();
    next_ = connect(system, address_of(context, next, "ring"), deadline);
    previous_ = accept(system, *listener, deadline);
  }

  // Runs a ring reduce-scatter, followed by a ring all-gather.
  void all_reduce(Values& values, Deadline deadline) {
    const int size = context_.world_size;
    const size_t chunk = kNumValues / static_cast<size_t>(size);
    const auto part = [&](int index) {
      return std::span(values).subspan(static_cast<size_t>((index + size) % size) * chunk, chunk);
    };
    std::vector<double> received(chunk);
    for (int step = 0; step < size - 1; ++step) {
      const std::span<double> target = part(context_.rank - step - 1);
      exchange(std::as_bytes(part(context_.rank - step)),
               std::as_writable_bytes(std::span(received)), deadline);
      std::transform(target.begin(), target.end(), received.begin(), target.begin(), std::plus());
    }
    for (int step = 0; step < size - 1; ++step) {
      exchange(std::as_bytes(part(context_.rank + 1 - step)),
               std::as_writable_bytes(part(context_.rank - step)), deadline);
    }
  }

 private:
  void exchange(ConstBytes out, Bytes in, Deadline deadline) {
    while (!out.empty() || !in.empty()) {
      size_t sent = next_->try_send(out).value_or_throw();
      const size_t received = previous_->try_recv(in).value_or_throw();
      if (planted_.ignores_short_sends && sent > 0) sent = out.size();
      out = out.subspan(sent);
      in = in.subspan(received);
      if (sent > 0 || received > 0) continue;
      std::array items = {os::PollItem{next_.get(), false, !out.empty()},
                          os::PollItem{previous_.get(), !in.empty()}};
      if (context_.system.poll(items, deadline)) continue;
      throw Error(ErrorCode::kTimeout, "the ring stood still until the deadline");
    }
  }

  RankContext& context_;
  const Planted planted_;
  std::unique_ptr<Socket> next_;
  std::unique_ptr<Socket> previous_;
};

// Each rank writes its values into its slot, and reads all slots in rank order. Control connections
// to rank 0 report deaths. A rank that learns of a death sets the abort word.
class Flat {
 public:
  Flat(RankContext& context, Planted planted, Deadline deadline)
      : context_(context), planted_(planted) {
    System& system = context.system;
    const Address address = address_of(context, 0, "flat");
    if (context.rank == 0) {
      segment_ = system.create_segment(sizeof(Arena)).value_or_throw();
      const auto listener = system.listen(address).value_or_throw();
      while (peers_.size() + 1 < static_cast<size_t>(context.world_size)) {
        peers_.push_back(accept(system, *listener, deadline));
        while (!peers_.back()->try_send_segment(*segment_).value_or_throw()) {
          wait_for(system, {peers_.back().get(), false, true}, deadline);
        }
      }
    } else {
      peers_.push_back(connect(system, address, deadline));
      while (!(segment_ = peers_[0]->try_recv_segment().value_or_throw())) {
        wait_for(system, {peers_[0].get(), true}, deadline);
      }
    }
  }

  void all_reduce(Values& values, Deadline deadline) {
    ++round_;
    wait_for_all(&Slot::departed, round_ - 1, deadline);
    mine().values = values;
    publish(mine().arrived, round_);
    wait_for_all(&Slot::arrived, round_, deadline);
    values.fill(0);
    for (const Slot& slot : slots()) {
      std::transform(values.begin(), values.end(), slot.values.begin(), values.begin(),
                     std::plus());
    }
    publish(mine().departed, round_);
  }

  // Leaves in an orderly way, so that the end of this rank's socket does not count as its death.
  void leave(Deadline deadline) {
    wait_for_all(&Slot::departed, round_, deadline);
    publish(mine().left, 1);
  }

 private:
  struct Slot {
    os::WaitWord arrived;
    os::WaitWord departed;
    os::WaitWord left;
    Values values;
  };
  struct Arena {
    os::WaitWord abort;
    std::array<Slot, kMaxRanks> slots;
  };

  Arena& arena() { return *reinterpret_cast<Arena*>(segment_->bytes().data()); }
  std::span<Slot> slots() {
    return std::span(arena().slots).first(static_cast<size_t>(context_.world_size));
  }
  Slot& mine() { return slots()[static_cast<size_t>(context_.rank)]; }

  void publish(os::WaitWord& word, uint32_t value) {
    if (planted_.forgets_to_wake) {
      word.value.store(value, std::memory_order_release);
    } else {
      context_.system.publish(word, value);
    }
  }

  void wait_for_all(os::WaitWord Slot::*member, uint32_t value, Deadline deadline) {
    for (Slot& slot : slots()) {
      os::WaitWord& word = slot.*member;
      for (;;) {
        const uint32_t seen = word.value.load(std::memory_order_acquire);
        if (seen >= value) break;
        check_peers();
        if (!context_.system.wait_while(word, seen, deadline)) {
          throw Error(ErrorCode::kTimeout, "a slot stood still until the deadline");
        }
      }
    }
  }

  void check_peers() {
    if (arena().abort.value.load(std::memory_order_acquire) != 0) {
      throw Error(ErrorCode::kAborted, "another rank found a dead one");
    }
    std::array<std::byte, 1> nothing{};
    for (const auto& peer : peers_) {
      const auto got = peer->try_recv(nothing);
      if (got.ok() || has_anyone_left()) continue;
      arena().abort.value.store(1, std::memory_order_release);
      for (Slot& slot : slots()) {
        context_.system.wake(slot.arrived);
        context_.system.wake(slot.departed);
      }
      throw got.error();
    }
  }

  bool has_anyone_left() {
    const auto has_left = [](const Slot& slot) { return slot.left.value.load() != 0; };
    return std::any_of(slots().begin(), slots().end(), has_left);
  }

  RankContext& context_;
  const Planted planted_;
  std::unique_ptr<os::SharedMemory> segment_;
  std::vector<std::unique_ptr<Socket>> peers_;
  uint32_t round_ = 0;
};

struct Job {
  int num_rounds = 4;
  Duration budget = seconds(20);
  Planted planted = {};
  std::function<void(int rank, int round)> before_round = [](int, int) {};
};

// Throws CheckFailed for a wrong sum. The values are small integers, so the sums are exact in any
// order.
template <typename AllReduce>
void check_rounds(RankContext& context, const Job& job, AllReduce all_reduce) {
  const int size = context.world_size;
  for (int round = 0; round < job.num_rounds; ++round) {
    job.before_round(context.rank, round);
    Values values{};
    for (size_t i = 0; i < kNumValues; ++i) {
      values[i] = static_cast<double>((context.rank + 1) * static_cast<int>(i) + round);
    }
    all_reduce(values);
    for (size_t i = 0; i < kNumValues; ++i) {
      const double expected = static_cast<double>(size * (size + 1) / 2 * static_cast<int>(i)) +
                              static_cast<double>(size * round);
      require(values[i] == expected, cadre::format("round {} element {}: {} instead of {}", round,
                                                   i, values[i], expected));
    }
  }
}

void run_ring(RankContext& context, const Job& job) {
  const Deadline deadline = context.system.deadline_in(job.budget);
  Ring ring(context, job.planted, deadline);
  check_rounds(context, job, [&](Values& values) { ring.all_reduce(values, deadline); });
}

void run_flat(RankContext& context, const Job& job) {
  const Deadline deadline = context.system.deadline_in(job.budget);
  Flat flat(context, job.planted, deadline);
  check_rounds(context, job, [&](Values& values) { flat.all_reduce(values, deadline); });
  flat.leave(deadline);
}

struct Engine {
  const char* name;
  void (*run)(RankContext&, const Job&);
};

class Seam : public ::testing::TestWithParam<Engine> {
 protected:
  RankMain rank_main(Job job) const {
    return
        [run = GetParam().run, job = std::move(job)](RankContext& context) { run(context, job); };
  }
};

TEST_P(Seam, RunsOnThreads) {
  const Resources before = count_resources();
  for (const int size : {2, 3, 4}) {
    EXPECT_EQ(run_ranks_as_threads(size, rank_main({.num_rounds = 200})).failures(), "");
  }
  EXPECT_EQ(leftovers_since(before), "");
}

TEST_P(Seam, RunsOnProcesses) {
  const Resources before = count_resources();
  for (const int size : {2, 3, 4}) {
    EXPECT_EQ(run_ranks_as_processes(size, rank_main({.num_rounds = 200})).failures(), "");
  }
  EXPECT_EQ(leftovers_since(before), "");
}

TEST_P(Seam, SurvivorsOfARealKillNameALostPeer) {
  for (int victim = 0; victim < 3; ++victim) {
    const RanksResult result = run_ranks_as_processes(
        3, rank_main({.num_rounds = 200, .before_round = [victim](int rank, int round) {
                        if (rank == victim && round == 100) ::raise(SIGKILL);
                      }}));
    for (int rank = 0; rank < 3; ++rank) {
      const RankOutcome& outcome = result.ranks[static_cast<size_t>(rank)];
      if (rank == victim) {
        EXPECT_EQ(outcome.signal, SIGKILL);
      } else {
        EXPECT_TRUE(outcome.failure.starts_with("kPeerLost") ||
                    outcome.failure.starts_with("kAborted"))
            << "rank " << rank << ": " << outcome.failure;
      }
    }
  }
}

TEST_P(Seam, RunsInTheSimulator) {
  for (const uint64_t seed : test_seeds(200)) {
    const auto result = run_ranks_in_simulator(seed, {}, 3, rank_main({}));
    ASSERT_EQ(result.failures(), "") << "seed " << seed;
  }
}

// Kills a rank at its n-th scheduling point, for n = 1, 2, ..., until a run ends without a kill.
// Survivors must end within their deadline, with an error that reports a failure or with the right
// sums.
TEST_P(Seam, SurvivesAKillAtEveryPoint) {
  constexpr Duration kBudget = milliseconds(200);
  int num_kills = 0;
  for (int victim = 0; victim < 3; ++victim) {
    int num_lost = 0;
    bool was_killed = true;
    for (int64_t point = 1; was_killed; ++point) {
      SCOPED_TRACE(cadre::format("rank {} killed at point {}, seed {}", victim, point, point));
      const auto result = run_ranks_in_simulator(
          static_cast<uint64_t>(point),
          {.faults = {sim::Fault::kill(victim, sim::When::at_point(victim, point))}}, 3,
          rank_main({.num_rounds = 2, .budget = kBudget}));
      was_killed = result.sim.faults.of(sim::FaultKind::kKill) > 0;
      num_kills += was_killed ? 1 : 0;
      ASSERT_EQ(result.sim.failure, "");
      for (int rank = 0; rank < 3; ++rank) {
        const sim::RankEnd& end = result.sim.ranks[static_cast<size_t>(rank)];
        if (rank == victim && was_killed) continue;
        EXPECT_LE(end.at, TimePoint{} + kBudget + milliseconds(1));
        EXPECT_FALSE(end.failure.starts_with("exception: check failed")) << end.failure;
        num_lost += end.failure.starts_with("kPeerLost") ? 1 : 0;
      }
      // The last run ends before the planned kill, which is reported as its only failure.
      EXPECT_EQ(result.failure.empty(), was_killed) << result.failure;
      EXPECT_TRUE(was_killed || RanksResult{result.ranks}.ok()) << result.failures();
    }
    EXPECT_GT(num_lost, 0);
  }
  RecordProperty("num_kills", num_kills);
}

TEST_P(Seam, AStoppedRankIsATimeout) {
  constexpr Duration kBudget = milliseconds(200);
  for (int64_t point = 1; point <= 40; point += 3) {
    SCOPED_TRACE(cadre::format("rank 1 stopped at point {}, seed {}", point, point));
    const auto result =
        run_ranks_in_simulator(static_cast<uint64_t>(point),
                               {.faults = {sim::Fault::stop(1, sim::When::at_point(1, point))}}, 3,
                               rank_main({.num_rounds = 50, .budget = kBudget}));
    ASSERT_EQ(result.sim.failure, "");
    EXPECT_EQ(result.sim.ranks[1].kind, sim::RankEnd::Kind::kStopped);
    for (const int rank : {0, 2}) {
      const sim::RankEnd& end = result.sim.ranks[static_cast<size_t>(rank)];
      EXPECT_EQ(end.kind, sim::RankEnd::Kind::kThrew);
      EXPECT_LE(end.at, TimePoint{} + kBudget + milliseconds(1));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, Seam,
                         ::testing::Values(Engine{"ring", run_ring}, Engine{"flat", run_flat}),
                         [](const auto& test) { return test.param.name; });

// The ranks run on several hosts, with slow links and with partitions that heal.
TEST(SeamRing, RunsAcrossHosts) {
  for (const uint64_t seed : test_seeds(100)) {
    const auto result = run_ranks_in_simulator(
        seed,
        {.ranks_per_host = {1, 1, 1},
         .faults = {sim::Fault::partition(0, 1, sim::When::at_time(milliseconds(2))),
                    sim::Fault::heal(0, 1, sim::When::at_time(milliseconds(900)))}},
        3, [](RankContext& context) { run_ring(context, {}); });
    // Only the ranks' failures are checked, because with some seeds the ranks end before the
    // faults, which then count as missed.
    ASSERT_EQ(RanksResult{result.ranks}.failures(), "") << "seed " << seed;
  }
}

int num_seeds_with_failure(sim::SimOptions options, void (*run)(RankContext&, const Job&),
                           Planted planted) {
  int count = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const auto result = run_ranks_in_simulator(seed, options, 3, [&](RankContext& context) {
      run(context, {.budget = seconds(1), .planted = planted});
    });
    count += result.ok() ? 0 : 1;
  }
  return count;
}

// The sleeps are long here, because short ones would hide a lost wake-up.
TEST(SeamPlanted, ALostWakeUpIsFound) {
  const sim::SimOptions options{.max_nap = seconds(10)};
  EXPECT_EQ(num_seeds_with_failure(options, run_flat, {}), 0);
  EXPECT_GT(num_seeds_with_failure(options, run_flat, {.forgets_to_wake = true}), 0);
}

TEST(SeamPlanted, AnIgnoredShortSendIsFound) {
  EXPECT_GT(num_seeds_with_failure({}, run_ring, {.ignores_short_sends = true}), 0);
}

}  // namespace
}  // namespace cadre::testing
