#include "cadre/collective/host/peers.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <vector>

#include "cadre/testing/ranks.h"

namespace cadre::host {
namespace {

using cadre::testing::RankContext;
using cadre::testing::require;
using cadre::testing::run_ranks_as_threads;

TEST(ArenaTest, PartsLieApartAndInside) {
  constexpr int kNumRanks = 5;
  std::vector<std::byte> memory(Arena::bytes(kNumRanks) + kFlagAlignment);
  const auto misaligned = reinterpret_cast<uintptr_t>(memory.data()) % kFlagAlignment;
  const Bytes aligned = Bytes(memory).subspan(kFlagAlignment - misaligned, Arena::bytes(kNumRanks));
  const Arena arena(aligned, kNumRanks);
  std::vector<Bytes> parts = {{reinterpret_cast<std::byte*>(&arena.notice()), sizeof(Notice)}};
  for (int rank = 0; rank < kNumRanks; ++rank) {
    for (uint32_t round : {0u, 1u}) {
      parts.push_back({reinterpret_cast<std::byte*>(&arena.entry(rank, round)), sizeof(Entry)});
      parts.push_back({arena.flat(rank, round), kFlatBytes});
    }
    parts.push_back({reinterpret_cast<std::byte*>(&arena.step_flag(rank)), sizeof(StepFlag)});
    for (size_t i = 0; i < kNumChunks; ++i) parts.push_back({arena.chunk(rank, i), kChunkBytes});
  }
  // Two parts that overlapped would give one byte two marks.
  for (Bytes part : parts) {
    ASSERT_GE(part.data(), aligned.data());
    ASSERT_LE(part.data() + part.size(), aligned.data() + aligned.size());
    for (std::byte& b : part) {
      ASSERT_EQ(b, std::byte{0});
      b = std::byte{1};
    }
  }
}

TEST(ArenaTest, RefusesMemoryThatIsTooSmall) {
  std::vector<std::byte> memory(100);
  EXPECT_THROW(Arena(memory, 2), Error);
}

// All counters start just below the wrap; every wait must still be one for the others' arrival.
TEST(PeersTest, CountersWrap) {
  constexpr int kNumRanks = 3;
  constexpr uint32_t kStart = 0xfffffff0u;
  const auto system = os::make_native_system();
  const std::shared_ptr<os::SharedMemory> memory =
      system->create_segment(Arena::bytes(kNumRanks)).value_or_throw();
  const Arena arena(memory->bytes(), kNumRanks);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    arena.entry(rank, 0).round.value = kStart;
    arena.entry(rank, 1).round.value = kStart;
    arena.step_flag(rank).step.value = kStart;
  }
  std::atomic<int> arrived{0};
  const auto result = run_ranks_as_threads(kNumRanks, [&](RankContext& context) {
    const os::Interrupt interrupt(context.system);
    Peers peers(context.system, interrupt, memory->bytes(),
                {.rank = context.rank,
                 .world_size = kNumRanks,
                 .oversubscribed = true,
                 .first_count = kStart});
    for (int i = 1; i <= 40; ++i) {
      OpProgress progress;
      const OpContext op{.number = static_cast<uint64_t>(i),
                         .fingerprint = {.call = 5},
                         .deadline = context.system.deadline_in(std::chrono::seconds(30)),
                         .progress = progress};
      arrived.fetch_add(1);
      peers.enter(op, {}).value_or_throw();
      require(arrived.load() >= (2 * i - 1) * kNumRanks, "entered alone");
      arrived.fetch_add(1);
      peers.reach(1);
      peers.wait_for_all(1, op).value_or_throw();
      require(arrived.load() >= 2 * i * kNumRanks, "stepped alone");
      peers.end_steps(1);
      peers.settle();
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::host
