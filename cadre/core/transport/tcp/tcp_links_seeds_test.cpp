// Tests groups whose connections are opened on first use, in the simulator with many seeds. The
// faults are short reads and writes, late packets, two ends that connect at the same time, and
// killed ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/testing/core/linked_process.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::LinkedProcess;
using testing::require;

constexpr uint16_t kFirstPort = 29600;
constexpr size_t kNumGroups = 2;
constexpr int kNumRounds = 4;

std::byte expected_byte(uint64_t group, int from, size_t at) {
  return static_cast<std::byte>((group * 59 + static_cast<size_t>(from) * 17 + at * 7 + at / 250) &
                                0xff);
}

// Exchanges bytes around a ring in one group. In each round every rank sends to the next member and
// receives from the previous one. The number of bytes depends on the seed.
class RingTalk {
 public:
  RingTalk(Transport& transport, uint64_t group, uint64_t seed)
      : transport_(transport), group_(group), sizes_(seed * 31 + group), pieces_(seed) {}

  void run(Deadline deadline) {
    for (int round = 0; round < kNumRounds; ++round) {
      exchange(1 + sizes_.below(30'000), deadline);
    }
  }

 private:
  void exchange(size_t size, Deadline deadline) {
    const int world_size = transport_.world_size();
    const int me = transport_.rank();
    const Rank next = (me + 1) % world_size;
    const Rank before = (me + world_size - 1) % world_size;
    std::vector<std::byte> out(size);
    std::vector<std::byte> in(size);
    for (size_t i = 0; i < size; ++i) out[i] = expected_byte(group_, me, num_bytes_ + i);
    size_t num_sent = 0;
    size_t num_received = 0;
    while (num_sent < size || num_received < size) {
      const size_t moved = num_sent + num_received;
      // Offers a random part of the unsent bytes. So after a partial send the remaining bytes are
      // offered again in other pieces.
      const size_t num_offered = std::min(size - num_sent, 1 + pieces_.below(size));
      num_sent += transport_.channel(next)
                      .try_send(ConstBytes(out).subspan(num_sent, num_offered))
                      .value_or_throw();
      num_received +=
          transport_.channel(before).try_recv(Bytes(in).subspan(num_received)).value_or_throw();
      if (num_sent + num_received > moved) continue;
      const std::array interests = {
          ChannelInterest{.peer = before, .want_recv = num_received < size},
          ChannelInterest{.peer = next, .want_send = num_sent < size}};
      transport_.wait(interests, deadline).value_or_throw();
    }
    for (size_t i = 0; i < size; ++i) {
      if (in[i] == expected_byte(group_, before, num_bytes_ + i)) continue;
      throw Error(ErrorCode::kInternal,
                  format("wrong byte {} of group {}", num_bytes_ + i, group_));
    }
    num_bytes_ += size;
  }

  Transport& transport_;
  const uint64_t group_;
  Random sizes_;  // equal on all ranks, so all draw the same sizes
  Random pieces_;
  size_t num_bytes_ = 0;  // the number of bytes sent so far to the next member
};

struct LinkedRun {
  sim::SimResult result;
  // failures[r][g] is the failure of rank r in group g.
  std::vector<std::array<std::string, kNumGroups>> failures;
  std::vector<int> num_dialed;
};

LinkedRun run_rings(uint64_t seed, int world_size, std::vector<sim::Fault> faults) {
  sim::SimOptions options;
  if (seed % 2 == 0) options.ranks_per_host = {world_size};
  if (seed % 2 == 1) options.ranks_per_host.assign(static_cast<size_t>(world_size), 1);
  options.faults = std::move(faults);
  const auto address_of = [one_host = seed % 2 == 0](int rank) {
    return os::Address{os::Address::Kind::kTcp, format("node{}", one_host ? 0 : rank),
                       static_cast<uint16_t>(kFirstPort + rank)};
  };
  sim::Simulator simulator(seed, options);
  LinkedRun run;
  run.failures.resize(static_cast<size_t>(world_size));
  run.num_dialed.resize(static_cast<size_t>(world_size));
  std::atomic<int> num_done{0};
  run.result = simulator.run([&](os::System& system, int rank) {
    LinkedProcess process(system, {rank, world_size}, address_of(rank), address_of);
    std::vector<std::unique_ptr<os::Thread>> threads;
    for (size_t group = 0; group < kNumGroups; ++group) {
      threads.push_back(system.spawn(format("group{}", group), [&, group] {
        std::string& failure = run.failures[static_cast<size_t>(rank)][group];
        failure = "killed";
        os::Interrupt interrupt;
        // The second group has the ranks in reverse order.
        std::vector<int> members(static_cast<size_t>(world_size));
        std::iota(members.begin(), members.end(), 0);
        if (group == 1) std::ranges::reverse(members);
        const Rank own = group == 1 ? world_size - 1 - rank : rank;
        const auto transport = process.links().open({100 + group, 1}, members, own, interrupt);
        RingTalk talk(*transport, group, seed);
        failure = testing::failure_of([&] { talk.run(system.deadline_in(seconds(20))); });
      }));
    }
    for (const auto& thread : threads) thread->join();
    run.num_dialed[static_cast<size_t>(rank)] = process.num_dialed();
    num_done.fetch_add(1);
    const auto pause = system.make_waiter();
    const Deadline patience = system.deadline_in(seconds(30));
    while (num_done.load() < world_size && !patience.has_passed(system.now())) {
      pause->park(system.deadline_in(milliseconds(10)));
    }
  });
  return run;
}

TEST(TcpLinksSeeds, GroupsKeepTheirBytesOverConnectionsMadeOnFirstUse) {
  int64_t num_short = 0;
  for (const uint64_t seed : testing::test_seeds(60)) {
    const int world_size = 2 + static_cast<int>(seed % 3);
    const LinkedRun run = run_rings(seed, world_size, {});
    ASSERT_EQ(run.result.failure, "") << "seed " << seed;
    num_short += run.result.faults.of(sim::FaultKind::kShortIo);
    for (int rank = 0; rank < world_size; ++rank) {
      for (const std::string& failure : run.failures[static_cast<size_t>(rank)]) {
        EXPECT_EQ(failure, "") << "seed " << seed << ", rank " << rank;
      }
    }
    const int num_dialed = std::accumulate(run.num_dialed.begin(), run.num_dialed.end(), 0);
    // Only neighbours in the ring are connected. This is the number of such pairs.
    const int num_pairs = world_size == 2 ? 1 : world_size;
    EXPECT_GE(num_dialed, num_pairs) << "seed " << seed;
    EXPECT_LE(num_dialed, 2 * num_pairs) << "seed " << seed;
  }
  EXPECT_GT(num_short, 0);
}

TEST(TcpLinksSeeds, AKilledPeerEndsWaitsAndNobodyGetsAWrongByte) {
  int num_lost = 0;
  for (const uint64_t seed : testing::test_seeds(60)) {
    constexpr int kWorldSize = 3;
    Random random(seed);
    const int victim = static_cast<int>(random.below(kWorldSize));
    const auto point = static_cast<int64_t>(20 + random.below(500));
    const LinkedRun run =
        run_rings(seed, kWorldSize, {sim::Fault::kill(victim, sim::When::at_point(victim, point))});
    ASSERT_EQ(run.result.failure, "") << "seed " << seed;
    for (int rank = 0; rank < kWorldSize; ++rank) {
      for (const std::string& failure : run.failures[static_cast<size_t>(rank)]) {
        const bool is_loss = failure.starts_with("kPeerLost");
        num_lost += is_loss ? 1 : 0;
        // A rank may also time out: this test has no control plane that reports the lost rank to
        // ranks without a connection to it.
        EXPECT_TRUE(failure.empty() || is_loss || failure.starts_with("kTimeout") ||
                    (rank == victim && failure == "killed"))
            << "seed " << seed << ", rank " << rank << ": " << failure;
      }
    }
  }
  EXPECT_GT(num_lost, 20);
}

}  // namespace
}  // namespace cadre
