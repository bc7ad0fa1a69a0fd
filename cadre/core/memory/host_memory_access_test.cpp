// Tests writes of peers through pointers that a program keeps: peers announce them, the owner can
// revoke them, and they never reach memory that is reused.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "cadre/core/memory/host_memory.h"
#include "cadre/core/os/system.h"

namespace cadre {
namespace {

constexpr size_t kAccessPage = 4096;
constexpr HostMemoryLayout kAccessLayout{
    .num_slots = 3, .front_bytes = 0, .slice_bytes = 64 * kAccessPage};

class HostMemoryAccessTest : public ::testing::Test {
 protected:
  std::shared_ptr<HostMemory> attach(int slot) const {
    return HostMemory::attach(segment_, kAccessLayout, slot).value_or_throw();
  }
  Piece cut() {
    return mine_->allocate({.num_bytes = kAccessPage, .holders = both_}).value_or_throw();
  }

  const std::shared_ptr<os::SharedMemory> segment_ =
      os::make_native_system()
          ->create_segment(HostMemory::segment_bytes(kAccessLayout))
          .value_or_throw();
  const std::shared_ptr<HostMemory> mine_ = attach(0);
  const std::shared_ptr<HostMemory> theirs_ = attach(1);
  const std::shared_ptr<HostMemory> third_ = attach(2);
  const std::vector<int> both_ = {1, 2};
};

TEST_F(HostMemoryAccessTest, WhatIsWithdrawnCannotBeAnnouncedAndOnlyWhatPeersWriteIsRevoked) {
  const Piece written = cut();
  const Piece unwritten = cut();
  EXPECT_TRUE(theirs_->announce_writer(0, written.place().piece));
  mine_->withdraw(written.place(), kAccessPage, "rank 2 timed out").value_or_throw();
  mine_->withdraw(unwritten.place(), kAccessPage, "rank 2 timed out").value_or_throw();
  EXPECT_TRUE(theirs_->is_revoked(0, written.place().piece));
  EXPECT_FALSE(theirs_->is_revoked(0, unwritten.place().piece));
  EXPECT_FALSE(theirs_->announce_writer(0, written.place().piece));
  EXPECT_FALSE(third_->announce_writer(0, unwritten.place().piece));
  EXPECT_TRUE(third_->is_withdrawn(0, unwritten.place().piece));
  EXPECT_NE(mine_->find(written.bytes()).error().message().find("rank 2 timed out"),
            std::string::npos);
  EXPECT_EQ(mine_->find(unwritten.bytes()).value_or_throw(), unwritten.place());
}

// Memory to which a lost rank may write must not be reused: the rank may still be alive, and its
// program may still use the pointer.
TEST_F(HostMemoryAccessTest, MemoryOfALostWriterIsNotUsedAgain) {
  Piece written = cut();
  Piece read = cut();
  EXPECT_TRUE(theirs_->announce_writer(0, written.place().piece));
  written = Piece();
  read = Piece();
  for (const uint32_t piece : {1U, 2U}) third_->release_hold(0, piece);
  mine_->forget_holder(1);
  const Piece next = cut();
  EXPECT_EQ(next.place(), (Place{.piece = 2, .offset = kAccessPage}))
      << "the piece without writers";
}

// A rank that was reported as lost may still be alive and announce its access after the owner has
// reused the piece. The announcement must fail.
TEST_F(HostMemoryAccessTest, AWriterThatWasReportedLostIsRefused) {
  Piece written = cut();
  written = Piece();
  third_->release_hold(0, 1);
  mine_->forget_holder(1);
  const Piece next = cut();
  EXPECT_EQ(next.place(), (Place{.piece = 1, .offset = 0}));
  EXPECT_FALSE(theirs_->announce_writer(0, 1));
  EXPECT_TRUE(third_->announce_writer(0, 1));
}

TEST_F(HostMemoryAccessTest, MemoryThatItsWritersHaveReleasedIsUsedAgainWithoutAMark) {
  Piece written = cut();
  EXPECT_TRUE(theirs_->announce_writer(0, written.place().piece));
  written = Piece();
  theirs_->release_hold(0, 1);
  third_->release_hold(0, 1);
  const Piece next = cut();
  EXPECT_EQ(next.place(), (Place{.piece = 1, .offset = 0}));
  mine_->withdraw(next.place(), kAccessPage, "a test").value_or_throw();
  EXPECT_FALSE(mine_->is_revoked(0, 1)) << "no peer may write to it";
}

TEST_F(HostMemoryAccessTest, AllThatPeersMayWriteToIsWithdrawnTogether) {
  const Piece first = cut();
  const Piece second = cut();
  const Piece third = cut();
  EXPECT_TRUE(theirs_->announce_writer(0, first.place().piece));
  EXPECT_TRUE(third_->announce_writer(0, third.place().piece));
  mine_->withdraw_all("the end").value_or_throw();
  EXPECT_TRUE(mine_->is_revoked(0, first.place().piece));
  EXPECT_FALSE(mine_->is_revoked(0, second.place().piece));
  EXPECT_TRUE(mine_->is_revoked(0, third.place().piece));
}

}  // namespace
}  // namespace cadre
