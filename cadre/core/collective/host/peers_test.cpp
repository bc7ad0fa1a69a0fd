#include "cadre/core/collective/host/peers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "cadre/core/memory/place.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::host {
namespace {

using cadre::testing::RankContext;
using cadre::testing::require;
using cadre::testing::run_ranks_as_threads;

// Makes an arena whose blocks are adjacent. In a real group they may lie anywhere.
Arena arena_in(Bytes memory) {
  std::vector<std::byte*> blocks;
  for (size_t at = 0; at + Arena::block_bytes() <= memory.size(); at += Arena::block_bytes()) {
    blocks.push_back(memory.data() + at);
  }
  return Arena(std::move(blocks));
}

TEST(ArenaTest, PartsLieApartAndInside) {
  constexpr int kNumRanks = 5;
  const size_t num_bytes = kNumRanks * Arena::block_bytes();
  std::vector<std::byte> memory(num_bytes + kFlagAlignment);
  const auto misaligned = reinterpret_cast<uintptr_t>(memory.data()) % kFlagAlignment;
  const Bytes aligned = Bytes(memory).subspan(kFlagAlignment - misaligned, num_bytes);
  const Arena arena = arena_in(aligned);
  std::vector<Bytes> parts = {{reinterpret_cast<std::byte*>(&arena.notice()), sizeof(Notice)}};
  for (int rank = 0; rank < kNumRanks; ++rank) {
    for (uint32_t sequence : {0u, 1u}) {
      parts.push_back({reinterpret_cast<std::byte*>(&arena.entry(rank, sequence)), sizeof(Entry)});
      parts.push_back({arena.flat(rank, sequence), kFlatBytes});
    }
    parts.push_back({reinterpret_cast<std::byte*>(&arena.step_flag(rank)), sizeof(StepFlag)});
    for (size_t i = 0; i < kNumChunks; ++i) parts.push_back({arena.chunk(rank, i), kChunkBytes});
  }
  // If two parts overlapped, one byte would get two marks.
  for (Bytes part : parts) {
    ASSERT_GE(part.data(), aligned.data());
    ASSERT_LE(part.data() + part.size(), aligned.data() + aligned.size());
    for (std::byte& b : part) {
      ASSERT_EQ(b, std::byte{0});
      b = std::byte{1};
    }
  }
}

// These numbers were computed by hand from docs/formats/shared-memory.md.
constexpr size_t kGoldenBlock = 4096 + 2 * 32768 + 4 * 524288;

template <typename T>
void put(std::vector<std::byte>& memory, size_t at, T value) {
  std::memcpy(memory.data() + at, &value, sizeof(value));
}

std::vector<std::byte> golden_arena() {
  std::vector<std::byte> memory(2 * kGoldenBlock);
  put<uint64_t>(memory, 384, 0x1'0000'0007);          // the notice: there is a mismatch in entry 7
  put<uint64_t>(memory, 392, 0x8000'0001'0000'0005);  // rank 1 has left entry 5
  const size_t entry = kGoldenBlock + 128;            // the entry of rank 1 for odd numbers
  put<uint32_t>(memory, entry, 0x01020304);           // sequence number
  put<uint32_t>(memory, entry + 4, 2);                // sleepers
  put<uint64_t>(memory, entry + 8, 0x1112131415161718);   // number of the operation
  put<uint64_t>(memory, entry + 16, 0x2122232425262728);  // Fingerprint::call
  put<uint64_t>(memory, entry + 24, 0x3132333435363738);  // Fingerprint::shape
  put<uint32_t>(memory, entry + 32, 9);  // the place of a buffer: piece, padding, offset
  put<uint64_t>(memory, entry + 40, 0x4142434445464748);
  put<uint32_t>(memory, 256, 77);            // the step of rank 0
  put<uint8_t>(memory, 4096 + 32768, 0xaa);  // the flat slot of rank 0 for odd numbers
  put<uint8_t>(memory, 4096 + 2 * 32768 + 3 * 524288, 0xbb);  // chunk 3 of rank 0
  return memory;
}

// Returns memory that is aligned to pages, like that of the engine.
std::shared_ptr<os::SharedMemory> arena_memory() {
  return os::make_native_system()->create_segment(2 * Arena::block_bytes()).value_or_throw();
}

TEST(ArenaTest, HasTheDocumentedBytes) {
  const auto memory = arena_memory();
  const Arena arena = arena_in(memory->bytes());
  arena.notice().mismatch = 0x1'0000'0007;
  arena.notice().left = 0x8000'0001'0000'0005;
  Entry& entry = arena.entry(1, 3);
  entry.sequence.value = 0x01020304;
  entry.sequence.sleepers = 2;
  entry.number = 0x1112131415161718;
  entry.fingerprint = {.call = 0x2122232425262728, .shape = 0x3132333435363738};
  const Place place{.piece = 9, .offset = 0x4142434445464748};
  std::memcpy(entry.payload.data(), &place, sizeof(place));
  arena.step_flag(0).step.value = 77;
  *arena.flat(0, 5) = std::byte{0xaa};
  *arena.chunk(0, 7) = std::byte{0xbb};
  EXPECT_TRUE(std::ranges::equal(memory->bytes(), golden_arena()));
}

TEST(ArenaTest, ReadsTheDocumentedBytes) {
  const auto memory = arena_memory();
  std::ranges::copy(golden_arena(), memory->bytes().begin());
  const Arena arena = arena_in(memory->bytes());
  EXPECT_EQ(arena.notice().mismatch, 0x1'0000'0007u);
  EXPECT_EQ(arena.notice().left, 0x8000'0001'0000'0005u);
  const Entry& entry = arena.entry(1, 1);
  EXPECT_EQ(entry.sequence.value, 0x01020304u);
  EXPECT_EQ(entry.sequence.sleepers, 2u);
  EXPECT_EQ(entry.number, 0x1112131415161718u);
  EXPECT_EQ(entry.fingerprint.call, 0x2122232425262728u);
  EXPECT_EQ(entry.fingerprint.shape, 0x3132333435363738u);
  Place place;
  std::memcpy(&place, entry.payload.data(), sizeof(place));
  EXPECT_EQ(place.piece, 9u);
  EXPECT_EQ(place.offset, 0x4142434445464748u);
  EXPECT_EQ(arena.step_flag(0).step.value, 77u);
  EXPECT_EQ(*arena.flat(0, 1), std::byte{0xaa});
  EXPECT_EQ(*arena.chunk(0, 3), std::byte{0xbb});
}

// All counters start just below their wrap-around. Every wait must still end only when the other
// ranks have arrived.
TEST(PeersTest, CountersWrap) {
  constexpr int kNumRanks = 3;
  constexpr uint32_t kStart = 0xfffffff0u;
  const auto system = os::make_native_system();
  const std::shared_ptr<os::SharedMemory> memory =
      system->create_segment(kNumRanks * Arena::block_bytes()).value_or_throw();
  const Arena arena = arena_in(memory->bytes());
  for (int rank = 0; rank < kNumRanks; ++rank) {
    arena.entry(rank, 0).sequence.value = kStart;
    arena.entry(rank, 1).sequence.value = kStart;
    arena.step_flag(rank).step.value = kStart;
  }
  std::atomic<int> arrived{0};
  const auto result = run_ranks_as_threads(kNumRanks, [&](RankContext& context) {
    const os::Interrupt interrupt;
    Peers peers(context.system, interrupt, arena,
                {.rank = context.rank,
                 .world_size = kNumRanks,
                 .oversubscribed = true,
                 .first_count = kStart});
    const Fingerprint fingerprint{.call = 5};
    for (int i = 1; i <= 40; ++i) {
      OpProgress progress;
      const OpContext op{.number = static_cast<uint64_t>(i),
                         .fingerprints = {&fingerprint, 1},
                         .deadline = context.system.deadline_in(std::chrono::seconds(30)),
                         .progress = progress};
      arrived.fetch_add(1);
      peers.enter(op, {}).value_or_throw();
      require(arrived.load() >= (2 * i - 1) * kNumRanks, "entered alone");
      arrived.fetch_add(1);
      peers.signal_step(1);
      peers.wait_for_all(1, op).value_or_throw();
      require(arrived.load() >= 2 * i * kNumRanks, "stepped alone");
      peers.end_steps(1);
      peers.wake_sleepers();
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::host
