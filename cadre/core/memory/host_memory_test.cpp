// Tests pieces of shared memory: where they are placed, when they are reused, and how peers may
// access them.
#include "cadre/core/memory/host_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cadre/core/os/host/host_info.h"
#include "cadre/core/os/native/segment.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/scarce_memory.h"

namespace cadre {
namespace {

constexpr size_t kPage = 4096;
constexpr HostMemoryLayout kThreeSlots{
    .num_slots = 3, .front_bytes = 100, .slice_bytes = 64 * kPage};

std::shared_ptr<os::SharedMemory> make_memory_segment(const HostMemoryLayout& layout) {
  return os::make_native_system()
      ->create_segment(HostMemory::segment_bytes(layout))
      .value_or_throw();
}

class HostMemoryTest : public ::testing::Test {
 protected:
  std::shared_ptr<HostMemory> attach(int slot) const {
    return HostMemory::attach(segment_, kThreeSlots, slot).value_or_throw();
  }

  std::shared_ptr<os::SharedMemory> segment_ = make_memory_segment(kThreeSlots);
  std::shared_ptr<HostMemory> mine_ = attach(0);
  std::shared_ptr<HostMemory> theirs_ = attach(1);
};

bool is_zero(ConstBytes bytes) {
  return std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0}; });
}

TEST_F(HostMemoryTest, APieceIsFoundByItsOwnerAndResolvedByItsPeers) {
  const std::vector<int> holders = {0, 1};
  const Piece first = mine_->allocate({.num_bytes = 5000, .holders = holders}).value_or_throw();
  const Piece second = mine_->allocate({.num_bytes = 10}).value_or_throw();
  EXPECT_EQ(first.bytes().size(), 5000u);
  EXPECT_EQ(first.place(), (Place{.piece = 1, .offset = 0}));
  EXPECT_EQ(second.place(), (Place{.piece = 2, .offset = 2 * kPage}));
  EXPECT_TRUE(is_zero(first.bytes()));
  const Place found = mine_->find(first.bytes().subspan(100, 50)).value_or_throw();
  EXPECT_EQ(found, (Place{.piece = 1, .offset = 100}));
  first.bytes()[100] = std::byte{7};
  EXPECT_EQ(*theirs_->resolve({0, found}, 50), std::byte{7});
  EXPECT_EQ(theirs_->front().size(), 100u);
  EXPECT_EQ(theirs_->allocate({.num_bytes = 1}).value_or_throw().place().offset, 0u);
}

TEST_F(HostMemoryTest, FindsOnlyBuffersWhollyInOneOfItsPieces) {
  const Piece piece = mine_->allocate({.num_bytes = kPage}).value_or_throw();
  Piece gone = mine_->allocate({.num_bytes = kPage}).value_or_throw();
  const Bytes gone_bytes = gone.bytes();
  gone = Piece();
  const auto find = [&](ConstBytes bytes) { return mine_->find(bytes).value_or_throw().piece; };
  EXPECT_EQ(find(piece.bytes()), 1u);
  EXPECT_EQ(find({piece.bytes().data(), kPage + 1}), 0u);
  EXPECT_EQ(find({piece.bytes().data() - 1, 2}), 0u);
  EXPECT_EQ(find(gone_bytes), 0u);
  const Piece theirs = theirs_->allocate({.num_bytes = kPage}).value_or_throw();
  EXPECT_EQ(find(theirs.bytes()), 0u);
  const std::vector<std::byte> elsewhere(10);
  EXPECT_EQ(find(elsewhere), 0u);
  EXPECT_EQ(find({}), 0u);
}

TEST_F(HostMemoryTest, PlacesOutsideASliceResolveToNothing) {
  const size_t slice = kThreeSlots.slice_bytes;
  EXPECT_NE(theirs_->resolve({2, {.piece = 1, .offset = slice - 8}}, 8), nullptr);
  EXPECT_EQ(theirs_->resolve({2, {.piece = 1, .offset = slice - 8}}, 9), nullptr);
  EXPECT_EQ(theirs_->resolve({2, {.piece = 1, .offset = slice + 1}}, 0), nullptr);
  EXPECT_EQ(theirs_->resolve({2, {.piece = 1, .offset = ~uint64_t{0}}}, 8), nullptr);
  EXPECT_EQ(theirs_->resolve({2, {.piece = 0, .offset = 0}}, 8), nullptr);
  EXPECT_EQ(theirs_->resolve({2, {.piece = HostMemory::kMaxPieces, .offset = 0}}, 8), nullptr);
  EXPECT_EQ(theirs_->resolve({3, {.piece = 1, .offset = 0}}, 8), nullptr);
  EXPECT_EQ(theirs_->resolve({-1, {.piece = 1, .offset = 0}}, 8), nullptr);
}

// The owner must not reuse the pages while a slow peer still accesses them.
TEST_F(HostMemoryTest, APieceIsUsedAgainWhenTheLastPeerHasReleasedIt) {
  const std::vector<int> both = {1, 2};
  const auto third = attach(2);
  Piece piece = mine_->allocate({.num_bytes = kPage, .holders = both}).value_or_throw();
  const uint32_t id = piece.place().piece;
  piece.bytes()[0] = std::byte{9};
  const std::byte* const seen = theirs_->resolve({0, piece.place()}, kPage);
  piece = Piece();
  theirs_->release_hold(0, id);
  const Piece other = mine_->allocate({.num_bytes = kPage}).value_or_throw();
  EXPECT_EQ(other.place(), (Place{.piece = 2, .offset = kPage}));
  EXPECT_EQ(*seen, std::byte{9});
  third->release_hold(0, id);
  const Piece again = mine_->allocate({.num_bytes = kPage}).value_or_throw();
  EXPECT_EQ(again.place(), (Place{.piece = 1, .offset = 0}));
  EXPECT_TRUE(is_zero(again.bytes()));
}

TEST_F(HostMemoryTest, APieceOfWhichNobodyWasToldIsUsedAgainAtOnce) {
  const std::vector<int> both = {1, 2};
  Piece piece = mine_->allocate({.num_bytes = kPage, .holders = both}).value_or_throw();
  piece.drop_holders();
  piece = Piece();
  EXPECT_EQ(mine_->allocate({.num_bytes = kPage}).value_or_throw().place().offset, 0u);
}

TEST_F(HostMemoryTest, ADeadRankHoldsNothing) {
  const std::vector<int> both = {1, 2};
  Piece piece = mine_->allocate({.num_bytes = kPage, .holders = both}).value_or_throw();
  piece = Piece();
  theirs_->release_hold(0, 1);
  EXPECT_EQ(mine_->allocate({.num_bytes = kPage}).value_or_throw().place().offset, kPage);
  const auto third = attach(2);
  EXPECT_FALSE(third->has_lost_holds());
  mine_->forget_holder(2);
  EXPECT_TRUE(third->has_lost_holds());
  EXPECT_FALSE(theirs_->has_lost_holds());
  EXPECT_EQ(mine_->allocate({.num_bytes = kPage}).value_or_throw().place().offset, 0u);
}

TEST_F(HostMemoryTest, ARevokedPieceIsRefusedWithItsFirstReasonAndNeverUsedAgain) {
  Piece piece = mine_->allocate({.num_bytes = 2 * kPage}).value_or_throw();
  const Piece other = mine_->allocate({.num_bytes = kPage}).value_or_throw();
  const Bytes bytes = piece.bytes();
  EXPECT_FALSE(theirs_->is_revoked(0, 1));
  mine_->revoke(piece.place(), kPage, "rank 1 timed out").value_or_throw();
  mine_->revoke(piece.place(), kPage, "rank 2 timed out").value_or_throw();
  EXPECT_TRUE(theirs_->is_revoked(0, 1));
  EXPECT_FALSE(theirs_->is_revoked(0, 2));
  const auto found = mine_->find(bytes);
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(found.error().code(), ErrorCode::kAborted);
  EXPECT_EQ(found.error().message(),
            "8192 bytes of this rank's symmetric memory were taken back from its peers after a "
            "failure, allocate new memory; the failure: rank 1 timed out");
  piece = Piece();
  EXPECT_EQ(mine_->find(bytes).value_or_throw(), Place());
  const Piece next = mine_->allocate({.num_bytes = kPage}).value_or_throw();
  EXPECT_EQ(next.place(), (Place{.piece = 3, .offset = 3 * kPage}));
}

// The peer is another process, which writes after the revocation. The owner must not see these
// writes.
TEST_F(HostMemoryTest, WhatPeersWriteAfterTheRevocationDoesNotShow) {
  Piece piece = mine_->allocate({.num_bytes = 2 * kPage}).value_or_throw();
  const auto result = testing::run_ranks_as_processes(2, [&](testing::RankContext& context) {
    if (context.rank == 0) {
      piece.bytes()[1] = std::byte{1};
      mine_->revoke(piece.place(), kPage, "a test").value_or_throw();
      reinterpret_cast<std::atomic<uint32_t>&>(*mine_->front().data()).store(1);
      while (piece.bytes()[kPage] == std::byte{0}) context.system.yield();
      testing::require(piece.bytes()[0] == std::byte{0}, "a late write shows");
      testing::require(piece.bytes()[1] == std::byte{1}, "the content was lost");
      return;
    }
    auto& is_revoked = reinterpret_cast<std::atomic<uint32_t>&>(*theirs_->front().data());
    while (is_revoked.load() == 0) context.system.yield();
    std::byte* const bytes = theirs_->resolve({0, piece.place()}, 2 * kPage);
    bytes[0] = std::byte{5};
    std::atomic_ref(bytes[kPage]).store(std::byte{1});
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Two groups fail at the same time and both revoke the piece. What the program writes between the
// two revocations must be kept.
TEST_F(HostMemoryTest, ASecondRevocationKeepsWhatWasWrittenSinceTheFirst) {
  Piece piece = mine_->allocate({.num_bytes = 4 * kPage}).value_or_throw();
  const auto result = testing::run_ranks_as_processes(2, [&](testing::RankContext& context) {
    auto& step = reinterpret_cast<std::atomic<uint32_t>&>(*mine_->front().data());
    std::byte* const bytes = theirs_->resolve({0, piece.place()}, 4 * kPage);
    if (context.rank == 1) {
      while (step.load() != 1) context.system.yield();
      std::fill_n(bytes, 4 * kPage, std::byte{5});
      step.store(2);
      return;
    }
    const auto revoke = [&](size_t page, size_t num_pages) {
      const Place place{.piece = piece.place().piece, .offset = page * kPage};
      mine_->revoke(place, num_pages * kPage, "a test").value_or_throw();
    };
    revoke(1, 1);
    piece.bytes()[kPage] = std::byte{1};
    revoke(1, 1);
    revoke(3, 1);
    piece.bytes()[3 * kPage] = std::byte{3};
    revoke(0, 4);
    step.store(1);
    while (step.load() != 2) context.system.yield();
    const std::vector<std::byte> expected = {std::byte{0}, std::byte{1}, std::byte{0},
                                             std::byte{3}};
    for (size_t page = 0; page < 4; ++page) {
      testing::require(bytes[page * kPage] == expected[page], "the page has its content");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_F(HostMemoryTest, APieceKeepsTheMemoryAndGivesItsPagesBack) {
  const testing::Resources before = testing::count_resources();
  {
    const auto segment = make_memory_segment(kThreeSlots);
    auto memory = HostMemory::attach(segment, kThreeSlots, 0).value_or_throw();
    const Piece piece = memory->allocate({.num_bytes = 3 * kPage}).value_or_throw();
    const std::weak_ptr<HostMemory> watch = memory;
    memory.reset();
    EXPECT_FALSE(watch.expired());
    std::ranges::fill(piece.bytes(), std::byte{1});
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

TEST_F(HostMemoryTest, PiecesOfSeveralSlotsAreMappedSideBySide) {
  const Piece a = mine_->allocate({.num_bytes = 100}).value_or_throw();
  const Piece b = theirs_->allocate({.num_bytes = 100}).value_or_throw();
  const std::vector<SlotPlace> places = {{1, b.place()}, {0, a.place()}};
  auto view = mine_->map_side_by_side(places, 100).value_or_throw();
  EXPECT_EQ(view->bytes().size(), 2 * kPage);
  b.bytes()[3] = std::byte{4};
  EXPECT_EQ(view->bytes()[3], std::byte{4});
  view->bytes()[kPage + 99] = std::byte{6};
  EXPECT_EQ(a.bytes()[99], std::byte{6});
  const std::vector<SlotPlace> askew = {{1, {.piece = 1, .offset = 8}}};
  EXPECT_EQ(mine_->map_side_by_side(askew, 100).error().code(), ErrorCode::kCorruption);
  const std::vector<SlotPlace> outside = {
      {1, {.piece = 1, .offset = kThreeSlots.slice_bytes - kPage}}};
  EXPECT_EQ(mine_->map_side_by_side(outside, kPage + 1).error().code(), ErrorCode::kCorruption);
}

TEST_F(HostMemoryTest, TooLittleRoomIsAnErrorWithItsSizes) {
  const Piece piece = mine_->allocate({.num_bytes = 60 * kPage}).value_or_throw();
  const auto more = mine_->allocate({.num_bytes = 5 * kPage});
  ASSERT_FALSE(more.ok());
  EXPECT_EQ(more.error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(more.error().message(),
            "host memory: a piece of 20480 bytes does not fit into the slice of slot 0: of its "
            "262144 bytes 16384 are free, at most 16384 of them contiguous; free symmetric memory");
}

TEST_F(HostMemoryTest, WithoutMemoryNothingIsCut) {
  const auto scarce = std::make_shared<testing::ScarceMemory>(segment_, 3 * kPage);
  const auto memory = HostMemory::attach(scarce, kThreeSlots, 0).value_or_throw();
  const auto refused = memory->allocate({.num_bytes = 4 * kPage});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(refused.error().message(), "host memory: a piece of 16384 bytes for slot 0: no memory");
  const auto scarce_again = std::make_shared<testing::ScarceMemory>(segment_, 3 * kPage);
  const auto again = HostMemory::attach(scarce_again, kThreeSlots, 0).value_or_throw();
  Piece piece =
      again->allocate({.num_bytes = 4 * kPage, .committed_bytes = kPage}).value_or_throw();
  EXPECT_EQ(piece.place(), (Place{.piece = 1, .offset = 0}));
  EXPECT_TRUE(piece.commit({kPage, kPage}).ok());
  EXPECT_EQ(piece.commit({2 * kPage, kPage}).error().code(), ErrorCode::kUnavailable);
}

TEST(HostMemoryLayoutTest, FollowsFromTheSizeOfTheSegment) {
  const size_t bytes = HostMemory::segment_bytes(kThreeSlots);
  // The segment consists of the front's page, a table of 65,536 headers of 128 bytes for each slot,
  // and the slices.
  EXPECT_EQ(bytes, kPage + 3 * (65536 * 128 + 64 * kPage));
  EXPECT_EQ(HostMemory::layout_of(bytes + kPage, {.num_slots = 3, .front_bytes = 100}),
            kThreeSlots);
  EXPECT_EQ(HostMemory::layout_of(kPage, {.num_slots = 3, .front_bytes = 100}).slice_bytes, 0u);
}

TEST(HostMemoryLayoutTest, ASliceIsAsLargeAsTheMachineWithinTheLimit) {
  os::HostInfo host;
  host.memory_bytes = 1 << 30;
  host.max_segment_bytes = uint64_t{16} << 40;
  EXPECT_EQ(HostMemory::default_slice_bytes(host, {.num_slots = 8}), size_t{1} << 30);
  host.max_segment_bytes = 1 << 30;
  EXPECT_EQ(HostMemory::default_slice_bytes(host, {.num_slots = 8}),
            (size_t{1} << 27) - 65536 * 128);
  EXPECT_GE(HostMemory::default_slice_bytes(os::read_host_info(), {.num_slots = 2}),
            size_t{1} << 20);
}

// The default size of the slices must keep the whole segment within the host's limit: beyond the
// limit on file sizes, SIGXFSZ would end the process.
TEST(HostMemoryLayoutTest, ASegmentWithItsFrontIsWithinTheLimit) {
  os::HostInfo host;
  host.memory_bytes = 1 << 30;
  for (const uint64_t limit : {uint64_t{1} << 26, (uint64_t{1} << 28) + 1}) {
    host.max_segment_bytes = limit;
    HostMemoryLayout layout = {.num_slots = 3, .front_bytes = 5 * kPage};
    layout.slice_bytes = HostMemory::default_slice_bytes(host, layout);
    EXPECT_LE(HostMemory::segment_bytes(layout), limit);
    EXPECT_GT(HostMemory::segment_bytes(layout), limit - 4 * kPage);
  }
}

TEST(HostMemoryLayoutTest, ASegmentThatIsTooSmallIsRefused) {
  const auto segment = make_memory_segment({.num_slots = 1, .slice_bytes = kPage});
  EXPECT_EQ(HostMemory::attach(segment, kThreeSlots, 0).error().code(), ErrorCode::kInternal);
  EXPECT_EQ(HostMemory::attach(segment, {.num_slots = 1, .slice_bytes = kPage}, 1).error().code(),
            ErrorCode::kInternal);
}

}  // namespace
}  // namespace cadre
