// Tests a rank that is stopped until the others have timed out and rebuilt the group without it.
// When it continues, it writes through its old pointers into the symmetric memory of the others.
// Those writes must not reach the memory that the others now use.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_job.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::failure_of;
using testing::RankContext;
using testing::require;

constexpr int kWorldSize = 3;
constexpr int kLate = 2;
constexpr Duration kTimeout = seconds(15);
constexpr size_t kPieceBytes = 5 * 4096 + 100;
constexpr std::byte kLateByte{0xEE};

bool is_all(ConstBytes bytes, std::byte value) {
  return std::ranges::all_of(bytes, [&](std::byte b) { return b == value; });
}

// Waits until the process is stopped (state "T" in /proc).
void await_stopped(RankContext& context, int pid) {
  const Deadline limit = context.system.deadline_in(kTimeout);
  for (std::string text; text.find(") T ") == std::string::npos;) {
    require(!limit.has_passed(context.system.now()), "the late rank was not stopped in time");
    std::ifstream stat(format("/proc/{}/stat", pid));
    std::getline(stat, text);
  }
}

std::byte fresh_value(int rank) {
  return static_cast<std::byte>(20 + rank);
}

// The late rank: keeps pointers to the other ranks' pieces of symmetric memory, and views of them,
// and writes through them after it was stopped.
void write_late(RankContext& context, Communicator& world, Store& store) {
  const auto buffer = world.allocate_symmetric(kPieceBytes);
  std::vector<Bytes> pieces = {buffer->writable_peer(0), buffer->writable_peer(1)};
  const Bytes view = buffer->contiguous();
  pieces.push_back(view.first(2 * view.size() / kWorldSize));
  world.barrier();
  ::raise(SIGSTOP);
  for (const Bytes piece : pieces) std::ranges::fill(piece, kLateByte);
  const std::string of_signal = failure_of([&] { buffer->signal(0, 1); });
  store.set("late rank has written", "1", context.system.deadline_in(kTimeout)).value_or_throw();
  // An operation of the group has already thrown the failure, and this call must throw the same
  // one.
  const std::string failure = failure_of([&] { world.barrier(); });
  require(failure.find("signal slot 7") != std::string::npos, failure);
  require(failure_of([&] { buffer->peer(0); }) == failure, "peer() must throw the first failure");
  context.output = of_signal;
}

// Checks that every access to the other ranks' pieces throws this error.
void require_refusals(RankContext& context, SymmetricBuffer& buffer, const std::string& failure) {
  const std::vector<std::function<void()>> calls = {
      [&] { buffer.peer(kLate); }, [&] { buffer.writable_peer(1 - context.rank); },
      [&] { buffer.contiguous(); }, [&] { buffer.signal(kLate, 0); },
      [&] { buffer.wait_signal(kLate, 1, context.system.deadline_in(kTimeout)); }};
  for (const auto& call : calls) {
    const std::string refused = failure_of(call);
    require(refused == failure, format("\"{}\" for \"{}\"", refused, failure));
  }
}

std::unique_ptr<Communicator> rebuild(RankContext& context, Communicator& world) {
  const auto lost = world.lost_ranks();
  world.close(context.system.deadline_in(kTimeout));
  const Membership membership = rejoin(context.system, world.membership(), lost,
                                       context.system.deadline_in(milliseconds(500)))
                                    .value_or_throw();
  return testing::connect(context, membership, {.timeout = kTimeout});
}

void survive(RankContext& context, Communicator& world, Store& store) {
  const int late_pid = world.peers()[kLate].pid;
  const auto buffer = world.allocate_symmetric(kPieceBytes);
  std::ranges::fill(buffer->local(), static_cast<std::byte>(10 + context.rank));
  world.barrier();
  const Deadline soon = context.system.deadline_in(milliseconds(context.rank == 0 ? 100 : 10'000));
  const std::string failure = failure_of([&] { buffer->wait_signal(kLate, 7, soon); });
  require(failure.find("signal slot 7: ") != std::string::npos, failure);
  require(is_all(buffer->local(), static_cast<std::byte>(10 + context.rank)),
          "the memory has lost its values");
  require_refusals(context, *buffer, failure);
  const auto rebuilt = rebuild(context, world);
  require(rebuilt->world_size() == 2, "the rebuilt group must have two ranks");
  std::ranges::fill(buffer->local(), fresh_value(context.rank));
  rebuilt->barrier();
  if (context.rank == 0) {
    await_stopped(context, late_pid);
    ::kill(late_pid, SIGCONT);
  }
  const std::string key = "late rank has written";
  store.get(key, context.system.deadline_in(kTimeout)).value_or_throw();
  require(is_all(buffer->local(), fresh_value(context.rank)),
          "a write of the late rank has reached this memory");
  rebuilt->all_reduce(buffer->local(), buffer->local(), DType::kUint8, ReduceOp::kSum);
  require(is_all(buffer->local(), std::byte{20 + 21}), "wrong sum of both ranks");
  require_refusals(context, *buffer, failure);
  rebuilt->close(context.system.deadline_in(kTimeout));
}

TEST(LateWriter, MemoryOfSurvivorsIsOutOfItsReach) {
  const testing::Resources before = testing::count_resources();
  const auto result = testing::run_job(
      {.world_size = kWorldSize}, [&](RankContext& context, const Membership& membership) {
        const auto world = testing::connect(context, membership, {.timeout = kTimeout});
        if (context.rank == kLate) return write_late(context, *world, *membership.store);
        survive(context, *world, *membership.store);
      });
  EXPECT_TRUE(result.ok()) << result.failures();
  // A signal to memory of the failed group throws, even if the late rank does not know of the
  // failure yet.
  EXPECT_NE(result.ranks[kLate].output, "");
  EXPECT_EQ(testing::leftovers_since(before), "");
}

// The memory belongs to a group that the survivors close in an orderly way before the world fails.
TEST(LateWriter, MemoryOfAClosedGroupIsOutOfItsReachWhenTheJobIsLeft) {
  const auto result =
      testing::run_job({.world_size = 2}, [&](RankContext& context, const Membership& membership) {
        Store& store = *membership.store;
        const Deadline limit = context.system.deadline_in(kTimeout);
        const auto world = testing::connect(context, membership, {.timeout = kTimeout});
        const int late_pid = world->peers()[1].pid;
        const auto buffer = world->allocate_symmetric(kPieceBytes);
        if (context.rank == 1) {
          const Bytes piece = buffer->writable_peer(0);
          world->barrier();
          ::raise(SIGSTOP);
          std::ranges::fill(piece, kLateByte);
          store.set("written", "1", limit).value_or_throw();
          return;
        }
        world->barrier();
        world->close(limit);
        std::ranges::fill(buffer->local(), fresh_value(0));
        await_stopped(context, late_pid);
        ::kill(late_pid, SIGCONT);
        store.get("written", limit).value_or_throw();
        require(is_all(buffer->local(), fresh_value(0)),
                "a write of the late rank has reached this memory");
      });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
