// Tests when each of two processes opens the connection between them.
#include "cadre/core/transport/tcp/dial_schedule.h"

#include <gtest/gtest.h>

#include <chrono>

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Step = DialTurn::Step;
using Ending = DialSchedule::Ending;

constexpr TimePoint kStart{1'000'000'000};
constexpr ChannelInterest kSend{.peer = 1, .want_send = true};
constexpr ChannelInterest kReceive{.peer = 1, .want_recv = true};
constexpr ChannelInterest kOptionalSend{.peer = 1, .want_send = true, .is_optional = true};

TEST(DialScheduleTest, TheHigherRankOpensAtOnceAndTheLowerOneLeavesItTwentyMilliseconds) {
  DialSchedule higher(true);
  EXPECT_EQ(higher.plan(kReceive, false, kStart).step, Step::kNow);
  DialSchedule lower(false);
  const DialTurn later = lower.plan(kSend, false, kStart);
  EXPECT_EQ(later.step, Step::kLater);
  EXPECT_EQ(later.at, kStart + milliseconds(20));
  EXPECT_EQ(lower.plan(kSend, false, kStart + milliseconds(19)).at, later.at);
  EXPECT_EQ(lower.plan(kSend, false, later.at).step, Step::kNow);
}

TEST(DialScheduleTest, TheLowerRankOpensNoConnectionToReceiveUnlessOneWasLost) {
  DialSchedule lower(false);
  EXPECT_EQ(lower.plan(kReceive, false, kStart).step, Step::kNone);
  lower.note_lost_opening();
  EXPECT_EQ(lower.plan(kReceive, false, kStart).step, Step::kLater);
  EXPECT_EQ(lower.plan(kReceive, false, kStart + milliseconds(20)).step, Step::kNow);
}

TEST(DialScheduleTest, AConnectionOfThePeerGetsTimeForItsFirstFrame) {
  DialSchedule higher(true);
  const DialTurn turn = higher.plan(kSend, true, kStart);
  EXPECT_EQ(turn.step, Step::kLater);
  EXPECT_EQ(turn.at, kStart + milliseconds(20));
}

TEST(DialScheduleTest, OneCallerOpensAtATime) {
  DialSchedule higher(true);
  EXPECT_EQ(higher.plan(kSend, false, kStart).step, Step::kNow);
  EXPECT_EQ(higher.plan(kSend, false, kStart + seconds(1)).step, Step::kNone);
  higher.end(Ending::kRefused, kStart + seconds(1));
  const DialTurn next = higher.plan(kSend, false, kStart + seconds(1));
  EXPECT_EQ(next.step, Step::kLater);
  EXPECT_EQ(next.at, kStart + seconds(1) + milliseconds(20));
}

TEST(DialScheduleTest, AttemptsThatWereTooShortDoubleUpToTwoSeconds) {
  DialSchedule higher(true);
  TimePoint now = kStart;
  for (const int patience_ms : {250, 500, 1000, 2000, 2000}) {
    const DialTurn turn = higher.plan(kSend, false, now);
    ASSERT_EQ(turn.step, Step::kNow);
    EXPECT_EQ(turn.patience, milliseconds(patience_ms));
    higher.end(Ending::kLate, now);
    now = now + milliseconds(20);
  }
}

TEST(DialScheduleTest, AnOptionalInterestTriesAgainAfterTenSeconds) {
  DialSchedule higher(true);
  EXPECT_EQ(higher.plan(kOptionalSend, false, kStart).step, Step::kNow);
  higher.end(Ending::kRefused, kStart);
  const DialTurn turn = higher.plan(kOptionalSend, false, kStart + seconds(1));
  EXPECT_EQ(turn.step, Step::kLater);
  EXPECT_EQ(turn.at, kStart + seconds(10));
  EXPECT_EQ(higher.plan(kSend, false, kStart + seconds(1)).step, Step::kNow);
}

}  // namespace
}  // namespace cadre
