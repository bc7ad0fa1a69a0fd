// Tests when the host engine wakes its peers, and its errors when there is no memory.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/collective/host/arena.h"
#include "cadre/testing/core/forwarding_system.h"
#include "cadre/testing/core/host_engine_ranks.h"

namespace cadre {
namespace {

using testing::RankContext;
using testing::require;

constexpr ReduceKind kSumOfFloats{DType::kFloat32, ReduceOp::kSum};
constexpr size_t kLargeBytes = 1 << 20;

// Records wake-ups and published words. A waiting rank is always registered as a sleeper and wakes
// only when a rank calls publish() or wake, so the test does not depend on the speed of the
// machine.
class ListeningSystem final : public testing::ForwardingSystem {
 public:
  // `num_wakes` counts the wake-ups by all ranks, which share it.
  ListeningSystem(os::System& inner, std::atomic<int>& num_wakes)
      : ForwardingSystem(inner), num_wakes_(num_wakes) {}

  const std::string& events() const { return events_; }
  void name(const os::WaitWord& word, std::string name) { names_.emplace_back(&word, name); }

  int spin_limit() override { return 10; }
  bool wait_while(os::WaitWord& word, uint32_t old, Deadline) override {
    const Deadline patience = deadline_in(std::chrono::seconds(20));
    const int seen = num_wakes_;
    word.sleepers.fetch_add(1);
    if (word.value.load() == old) {
      while (num_wakes_ == seen && !patience.has_passed(now())) inner_.yield();
    }
    word.sleepers.fetch_sub(1);
    return word.value.load() != old;
  }
  void publish(os::WaitWord& word, uint32_t value) override {
    note("publish", word);
    inner_.publish(word, value);
    ++num_wakes_;
  }
  void wake(os::WaitWord& word) override {
    note("wake", word);
    inner_.wake(word);
    ++num_wakes_;
  }

 private:
  void note(const char* what, const os::WaitWord& word) {
    for (const auto& [known, name] : names_) {
      if (known == &word) events_ += std::string(what) + " " + name + "; ";
    }
  }

  std::atomic<int>& num_wakes_;
  std::vector<std::pair<const os::WaitWord*, std::string>> names_;
  std::string events_;
};

// Rank 0 sleeps until rank 1, the last rank, enters. Rank 1 must wake rank 0 before it begins its
// own work, and not when the operation ends. A missing wake-up would cost up to System::kMaxNap.
class LastToEnterTest : public ::testing::TestWithParam<bool> {};

TEST_P(LastToEnterTest, WakesTheSleepersBeforeItsOwnWork) {
  const bool is_symmetric = GetParam();
  TestMemory memory(2, {.slice_bytes = kLargeBytes});
  const host::Arena arena = memory.arena();
  std::atomic<int> num_wakes{0};
  const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
    ListeningSystem system(context.system, num_wakes);
    RankContext listening{.system = system,
                          .rank = context.rank,
                          .world_size = context.world_size,
                          .rendezvous_address = {},
                          .output = {}};
    TestRank rank(listening, memory);
    std::vector<std::byte> own(kLargeBytes);
    const Bytes data = is_symmetric ? memory.slice(context.rank) : Bytes(own);
    os::WaitWord& entry_of_last = arena.entry(1, 1).sequence;
    if (context.rank == 1) {
      system.name(entry_of_last, "entry");
      system.name(arena.step_flag(1).step, "step");
      while (entry_of_last.sleepers.load() == 0) context.system.yield();
    }
    rank.all_reduce(data, data, kSumOfFloats).value_or_throw();
    if (context.rank == 1) {
      require(system.events().starts_with("wake entry; publish step; "), system.events());
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

INSTANTIATE_TEST_SUITE_P(All, LastToEnterTest, ::testing::Values(true, false),
                         [](const auto& test) { return test.param ? "Direct" : "Staged"; });

// The bytes of a block that has only flags: one page for the flags and one for the allocation's
// header.
constexpr size_t kForFlags = 2 * 4096;

TEST(HostEngineReserveTest, ReservesWhatItWritesBeforeItWrites) {
  const size_t for_small = kForFlags + 2 * host::kFlatBytes;
  TestMemory memory(2,
                    {.num_free = {for_small, for_small + host::kNumChunks * host::kChunkBytes, 0}});
  const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
    TestRank rank(context, memory);
    std::vector<std::byte> little(host::kFlatBytes);
    std::vector<std::byte> much(kLargeBytes);
    rank.all_reduce(little, little, kSumOfFloats).value_or_throw();
    rank.set_patience(std::chrono::milliseconds(context.rank == 0 ? 60'000 : 50));
    const Status status = rank.all_reduce(much, much, kSumOfFloats);
    require(!status.ok(), "it succeeded");
    const ErrorCode expected = context.rank == 0 ? ErrorCode::kUnavailable : ErrorCode::kTimeout;
    const bool is_left = status.error().code() == ErrorCode::kAborted;
    require(status.error().code() == expected || (context.rank == 1 && is_left),
            status.error().message());
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// An operation of more than kInlineBytes needs slots in shared memory, for which there is no memory
// left. The engine returns an error instead of ending in a SIGBUS, and before it announces the
// operation, so the number of the next one is right.
TEST(HostEngineReserveTest, AMediumOperationWithoutMemoryIsRefusedBeforeItBegins) {
  TestMemory memory(1, {.num_free = {kForFlags, 0}});
  const auto result = testing::run_ranks_as_threads(1, [&](RankContext& context) {
    TestRank rank(context, memory);
    std::vector<std::byte> tiny(host::kInlineBytes);
    std::vector<std::byte> little(host::kInlineBytes + 4);
    rank.all_reduce(tiny, tiny, kSumOfFloats).value_or_throw();
    const Status status = rank.all_reduce(little, little, kSumOfFloats);
    require(!status.ok() && status.error().code() == ErrorCode::kUnavailable, "it succeeded");
    rank.barrier().value_or_throw();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(HostEngineReserveTest, ABlockWithoutMemoryIsRefusedAtOnce) {
  EXPECT_THROW(TestMemory(2, {.num_free = {kForFlags, 4096, 0}}), Error);
}

TEST(HostEngineMemoryTest, ABlockOutsideOfItsSliceIsRefused) {
  TestMemory memory(2);
  const auto result = testing::run_ranks_as_threads(1, [&](RankContext& context) {
    HostEngineSetup setup = memory.setup_of(0);
    setup.blocks[1].offset += 4096 + 1;
    EXPECT_THROW(TestRank(context, std::move(setup)), Error);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A rank's block must not be freed while an engine of another rank may read the flags in it.
TEST(HostEngineMemoryTest, ABlockGoesWhenTheLastEngineThatReadsItHasGone) {
  const auto system = os::make_native_system();
  const os::Interrupt interrupt;
  const auto memories = testing::make_host_memories(
      *system, {.num_slots = 2, .slice_bytes = 2 * host::Arena::block_bytes()});
  const std::vector<int> slots = {0, 1};
  std::vector<Piece> blocks;
  std::vector<Place> places;
  for (const auto& memory : memories) {
    blocks.push_back(HostEngine::cut_block(*memory, slots).value_or_throw());
    places.push_back(blocks.back().place());
  }
  std::vector<std::unique_ptr<HostEngine>> engines;
  for (int rank = 0; rank < 2; ++rank) {
    const auto index = static_cast<size_t>(rank);
    engines.push_back(std::make_unique<HostEngine>(
        *system, interrupt,
        HostEngineSetup{memories[index], rank, true, slots, places, std::move(blocks[index])}));
  }
  const auto next_offset = [&] {
    return memories[0]->allocate({.num_bytes = 4096}).value_or_throw().place().offset;
  };
  engines[0].reset();
  EXPECT_EQ(next_offset(), host::Arena::block_bytes());
  engines[1].reset();
  EXPECT_EQ(next_offset(), 0u);
}

}  // namespace
}  // namespace cadre
