// Tests which operation the status page shows for a rank that runs both collectives and messages.
#include "cadre/core/fabric/status_page.h"

#include <gtest/gtest.h>

#include "cadre/core/collective/op.h"

namespace cadre {
namespace {

Fingerprint fingerprint_of(OpKind kind) {
  return OpDescriptor{kind, DType::kUint8, ReduceOp::kSum, 0, 1}.fingerprint();
}

constexpr TimePoint at(int64_t time_s) {
  return TimePoint{time_s * 1'000'000'000};
}

// The recv is issued before the all_reduce begins, and fails after the all_reduce has ended.
TEST(StatusPage, AFailedMessageIsShownBeforeACollectiveThatSucceededSinceItBegan) {
  GroupCell cell;
  cell.message.begin(3, fingerprint_of(OpKind::kRecv), at(1));
  OpProgress(&cell.message.progress).set_waiting_for(2);
  cell.collective.begin(8, fingerprint_of(OpKind::kAllReduce), at(2));
  EXPECT_EQ(cell.read(at(3)).number, 8U);
  cell.collective.end(true, at(4));
  EXPECT_EQ(cell.read(at(5)).number, 3U);
  cell.message.end(false, at(6));
  const wire::Activity shown = cell.read(at(7));
  EXPECT_EQ(shown.state, wire::ActivityState::kFailed);
  EXPECT_EQ(shown.number, 3U);
  EXPECT_EQ(shown.waiting_for, 2);
}

TEST(StatusPage, OfTwoOperationsThatSucceededTheLaterIsShown) {
  GroupCell cell;
  EXPECT_EQ(cell.read(at(1)).state, wire::ActivityState::kNothingYet);
  cell.message.begin(3, fingerprint_of(OpKind::kRecv), at(1));
  cell.message.end(true, at(2));
  EXPECT_EQ(cell.read(at(3)).number, 3U);
  cell.collective.begin(8, fingerprint_of(OpKind::kAllReduce), at(3));
  cell.collective.end(true, at(4));
  EXPECT_EQ(cell.read(at(5)).number, 8U);
}

TEST(StatusCells, WhatRunsIsShownBeforeWhatHasFailed) {
  StatusCells cells(StatusPage(), 0);
  const auto failed = cells.take(1, "a");
  const auto running = cells.take(2, "e");
  EXPECT_EQ(cells.running_besides(3, at(1)), "");
  failed->collective.begin(1, fingerprint_of(OpKind::kAllReduce), at(1));
  EXPECT_EQ(cells.running_besides(3, at(2)), "all_reduce #1 of group \"a\"");
  failed->collective.end(false, at(2));
  EXPECT_EQ(cells.running_besides(3, at(3)), "all_reduce #1 of group \"a\", which has failed");
  running->collective.begin(1, fingerprint_of(OpKind::kBarrier), at(4));
  EXPECT_EQ(cells.running_besides(3, at(5)), "barrier #1 of group \"e\"");
  EXPECT_EQ(cells.running_besides(2, at(5)), "all_reduce #1 of group \"a\", which has failed");
  running->collective.end(true, at(6));
  const auto wait = cells.show_wait("the wait of a store");
  EXPECT_EQ(cells.running_besides(3, at(7)), "the wait of a store");
}

}  // namespace
}  // namespace cadre
