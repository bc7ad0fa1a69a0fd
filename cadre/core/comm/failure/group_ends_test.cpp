#include "cadre/core/comm/failure/group_ends.h"

#include <gtest/gtest.h>

#include "cadre/core/collective/op.h"

namespace cadre {
namespace {

Call broadcast_from(int root, Call call) {
  call.fingerprint =
      OpDescriptor{OpKind::kBroadcast, DType::kInt32, ReduceOp::kSum, root, 4}.fingerprint();
  return call;
}

TEST(GroupEnds, RanksThatCalledTheSameAgree) {
  GroupEnds ends(2, 1);
  ends.note_left(broadcast_from(0, {0, 3}));
  EXPECT_FALSE(ends.take_mismatch().has_value());
  ends.note_left(broadcast_from(0, {1, 3}));
  EXPECT_FALSE(ends.take_mismatch().has_value());
}

TEST(GroupEnds, AMismatchWithTheLowestRankIsReturnedOnce) {
  GroupEnds ends(4, 1);
  ends.note_left(broadcast_from(2, {3, 3}));
  ends.note_left(broadcast_from(0, {2, 3}));
  EXPECT_FALSE(ends.take_mismatch().has_value());  // this rank is still in the group
  ends.note_left(broadcast_from(1, {1, 3}));
  const auto mismatch = ends.take_mismatch();
  ASSERT_TRUE(mismatch.has_value());
  EXPECT_EQ(mismatch->one.rank, 1);
  EXPECT_EQ(mismatch->other.rank, 2);
  ends.note_left(broadcast_from(3, {0, 3}));
  EXPECT_FALSE(ends.take_mismatch().has_value());
}

TEST(GroupEnds, AnotherNumberOfCollectivesIsAMismatch) {
  GroupEnds ends(2, 0);
  ends.note_left(broadcast_from(0, {1, 2}));
  ends.note_left(broadcast_from(0, {0, 3}));
  const auto mismatch = ends.take_mismatch();
  ASSERT_TRUE(mismatch.has_value());
  EXPECT_EQ(mismatch->one.number, 3U);
  EXPECT_EQ(mismatch->other.number, 2U);
}

TEST(GroupEnds, AreOpenFromTheOwnLeaveUntilAllHaveLeftOrTheGroupFails) {
  GroupEnds ends(3, 0);
  EXPECT_FALSE(ends.is_open());
  ends.note_left({0, 0, {}});
  EXPECT_TRUE(ends.is_open());
  for (int again = 0; again < 2; ++again) {
    ends.note_left({1, 0, {}});
    EXPECT_TRUE(ends.is_open());
  }
  GroupEnds failed = ends;
  failed.note_failed();
  EXPECT_FALSE(failed.is_open());
  ends.note_left({2, 0, {}});
  EXPECT_FALSE(ends.is_open());
}

}  // namespace
}  // namespace cadre
