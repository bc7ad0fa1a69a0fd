#include "cadre/core/fabric/flight/flight_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cadre/core/fabric/flight/flight_record.h"

namespace cadre {
namespace {

const FlightIdentity kRecordedRank{.group = "world", .host = "node0", .rank = 1, .world_size = 4};

TEST(FlightRecorderTest, BeforeItsRankIsConnectedItHasConnectionZero) {
  const auto recorder = FlightRecorder::create("", {"world", "node0", 0, 2, 1, 0}).value_or_throw();
  EXPECT_EQ(recorder->read().identity.connection, 0U);
  recorder->set_connection(7);
  EXPECT_EQ(recorder->read().identity.connection, 7U);
}

TEST(FlightRecorderTest, TheRingKeepsTheLastTwoThousand) {
  auto recorder = FlightRecorder::create("", kRecordedRank).value_or_throw();
  constexpr uint64_t kNumOperations = 2 * kFlightRecordCapacity + 17;
  const uint64_t stale = recorder->begin(0, {}, -1, {1});
  for (uint64_t i = 1; i < kNumOperations; ++i) recorder->begin(i, {}, -1, {1});
  // The ring has wrapped around: the slot belongs to another operation.
  recorder->end(stale, {.now = {2}});
  const FlightRecord record = recorder->read();
  ASSERT_EQ(record.entries.size(), kFlightRecordCapacity);
  for (size_t i = 0; i < record.entries.size(); ++i) {
    EXPECT_EQ(record.entries[i].number, kNumOperations - kFlightRecordCapacity + i);
    EXPECT_EQ(record.entries[i].state, wire::ActivityState::kRunning);
  }
}

TEST(FlightRecorderTest, AFolderThatIsMissingIsNamed) {
  const auto recorder = FlightRecorder::create("/nonexistent/folder/record", kRecordedRank);
  ASSERT_FALSE(recorder.ok());
  EXPECT_THAT(recorder.error().message(), ::testing::HasSubstr("/nonexistent/folder/record"));
}

}  // namespace
}  // namespace cadre
