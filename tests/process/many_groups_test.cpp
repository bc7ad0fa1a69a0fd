// Measures the resources of 64 groups of all ranks of a job on one host or on two. A group must
// need no thread and no descriptor of its own, and closing it must release its shared memory.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/on_host.h"
#include "cadre/testing/core/process_job.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using testing::RankContext;
using testing::require;
using testing::Resources;

constexpr int kNumRanks = 8;
constexpr int kNumGroups = 64;
// The largest number of threads of a process, including that of main().
constexpr int kMaxThreads = 4;
constexpr Duration kBudget = seconds(60);

using Groups = std::vector<std::unique_ptr<Communicator>>;

// The engines of the groups: the host engine, the net engine, and the hierarchical engine on two
// pretended hosts.
enum class Engine { kHost, kTcp, kTwoHosts };

std::string name_of(const ::testing::TestParamInfo<Engine>& info) {
  return info.param == Engine::kHost ? "host" : info.param == Engine::kTcp ? "tcp" : "two_hosts";
}

CommunicatorOptions options_of(Engine engine) {
  CommunicatorOptions options;
  if (engine == Engine::kHost) options.transport = TransportChoice::kSharedMemory;
  if (engine == Engine::kTcp) options.transport = TransportChoice::kTcp;
  if (engine == Engine::kTwoHosts) options.listen_host = "127.0.0.1";
  return options;
}

int host_of(Rank rank) {
  return rank.value / (kNumRanks / 2);
}

void all_reduce_8_bytes(Communicator& group) {
  std::vector<int64_t> value = {group.rank() + 1};
  const Bytes data = std::as_writable_bytes(std::span(value));
  group.all_reduce(data, data, DType::kInt64, ReduceOp::kSum);
  require(value[0] == kNumRanks * (kNumRanks + 1) / 2, "wrong sum of the group");
}

// Two ranks may open a connection when they first exchange data. Every pair exchanges data here,
// before the measurement, so that the connection is not attributed to a group.
void use_all_pairs(Communicator& world) {
  std::vector<int64_t> in(kNumRanks, world.rank());
  std::vector<int64_t> out(kNumRanks);
  world.all_to_all(std::as_bytes(std::span(in)), std::as_writable_bytes(std::span(out)),
                   DType::kInt64);
  all_reduce_8_bytes(world);
}

Groups make_groups(Communicator& world) {
  std::vector<Rank> all;
  for (int rank = 0; rank < kNumRanks; ++rank) all.emplace_back(rank);
  Groups groups;
  for (int i = 0; i < kNumGroups; ++i) {
    groups.push_back(new_group(world, all, world.system().deadline_in(kBudget)));
  }
  return groups;
}

void close_groups(Groups& groups) {
  for (const auto& group : groups) group->close(group->system().deadline_in(kBudget));
  groups.clear();
}

// Counts a resource on each rank at a time when no rank has an operation in progress.
template <typename Count>
auto count_in_peace(Communicator& world, const Count& count) {
  world.barrier();
  const auto counted = count();
  world.barrier();
  return counted;
}

class ManyGroups : public ::testing::TestWithParam<Engine> {
 protected:
  // Runs `body` on each rank of a job, with the world as its argument.
  template <typename Body>
  static testing::RanksResult run(const Body& body) {
    const auto run_rank = [&](RankContext& context, const Membership& membership) {
      const Resources alone = testing::count_resources();
      const auto world = testing::connect(context, membership, options_of(GetParam()));
      use_all_pairs(*world);
      body(*world, alone);
      world->close(context.system.deadline_in(kBudget));
    };
    return testing::run_job({.world_size = kNumRanks, .processes = {.time_limit = kBudget}},
                            [&](RankContext& context, const Membership& membership) {
                              std::optional<int> host;
                              if (GetParam() == Engine::kTwoHosts) host = host_of(context.rank);
                              testing::run_on_host(context, host, [&](RankContext& placed) {
                                run_rank(placed, membership);
                              });
                            });
  }
};

TEST_P(ManyGroups, AddNoThreadAndNoDescriptor) {
  const auto result = run([](Communicator& world, const Resources& alone) {
    const Resources before = count_in_peace(world, testing::count_resources);
    const auto check = [&](std::string_view groups) {
      const Resources now = count_in_peace(world, testing::count_resources);
      // The number of threads before the world was connected may include one of a sanitizer.
      const int num_threads = now.num_threads - alone.num_threads + 1;
      require(num_threads <= kMaxThreads,
              format("{} threads with {} groups, {} with the world alone", num_threads, groups,
                     before.num_threads));
      // These descriptors do not depend on the number of groups: if two ranks connect to each other
      // at the same time, they have two connections, and a thread that sleeps for the first time
      // adds an event to the pool.
      require(now.num_fds <= before.num_fds + kNumRanks,
              format("{} descriptors with {} groups, {} with the world alone", now.num_fds, groups,
                     before.num_fds));
    };
    Groups groups = make_groups(world);
    check("idle");
    for (const auto& group : groups) all_reduce_8_bytes(*group);
    check("used");
    close_groups(groups);
    check("closed");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The groups are made twice, because the data structures that manage the shared memory may grow
// with the first groups and are kept.
TEST_P(ManyGroups, GiveTheirSharedMemoryBack) {
  const auto result = run([](Communicator& world, const Resources&) {
    // Symmetric memory of a group on two hosts is private, so each host has a group for it.
    const auto near =
        split(world, {.color = GetParam() == Engine::kTwoHosts ? host_of(world.rank()) : 0},
              world.system().deadline_in(kBudget));
    const int64_t with_world = count_in_peace(world, testing::committed_shared_bytes);
    // This memory is only the job's status page if the transport is TCP.
    require(with_world > 0, "no shared memory of the job was found");
    int64_t closed_before = with_world;
    for (const int64_t share_that_may_stay : {8, 32}) {
      Groups groups = make_groups(world);
      for (const auto& group : groups) all_reduce_8_bytes(*group);
      const int64_t used = count_in_peace(world, testing::committed_shared_bytes);
      close_groups(groups);
      // A rank releases a piece that no other rank holds at its next allocation at the latest, so
      // the test allocates once more.
      world.barrier();
      near->allocate_symmetric(1).reset();
      const int64_t closed = count_in_peace(world, testing::committed_shared_bytes);
      const int64_t added = used - closed_before;
      require(closed - closed_before <= added / share_that_may_stay,
              format("{} bytes are committed after {} groups were closed, {} before they were "
                     "made, {} when they were used",
                     closed, kNumGroups, closed_before, used));
      closed_before = closed;
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

INSTANTIATE_TEST_SUITE_P(All, ManyGroups,
                         ::testing::Values(Engine::kHost, Engine::kTcp, Engine::kTwoHosts),
                         name_of);

}  // namespace
}  // namespace cadre
