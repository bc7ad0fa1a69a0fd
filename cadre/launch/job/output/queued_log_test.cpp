// Tests which lines the launcher's log keeps, drops and counts.
#include "cadre/launch/job/output/queued_log.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>

#include "cadre/core/base/format.h"

namespace cadre::launch {
namespace {

class QueuedLogTest : public ::testing::Test {
 protected:
  bool is_readable(QueuedLog& log) {
    std::array items{os::PollItem{.target = &log.pollable(), .want_read = true}};
    return system_->poll(items, system_->deadline_in(std::chrono::milliseconds(0)));
  }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
};

TEST_F(QueuedLogTest, KeepsLinesFromItsLevelOnUntilTheyAreTaken) {
  QueuedLog log(*system_, LogLevel::kWarning);
  log.write(LogLevel::kInfo, "store", "too quiet");
  EXPECT_FALSE(is_readable(log));
  log.write(LogLevel::kWarning, "store", "dropped peer=1");
  log.write(LogLevel::kError, "store", "worse");
  EXPECT_TRUE(is_readable(log));
  const auto lines = log.take();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_TRUE(lines[0].starts_with("warning 2")) << lines[0];
  EXPECT_TRUE(lines[0].ends_with("Z store dropped peer=1")) << lines[0];
  EXPECT_TRUE(lines[1].starts_with("error ")) << lines[1];
  EXPECT_FALSE(is_readable(log));
  EXPECT_TRUE(log.take().empty());
}

TEST_F(QueuedLogTest, OffKeepsNothing) {
  QueuedLog log(*system_, LogLevel::kOff);
  log.write(LogLevel::kError, "store", "lost");
  EXPECT_TRUE(log.take().empty());
}

TEST_F(QueuedLogTest, CountsWhatItHasNoRoomFor) {
  QueuedLog log(*system_, LogLevel::kWarning);
  for (size_t i = 0; i < QueuedLog::kMaxLines + 3; ++i) {
    log.write(LogLevel::kWarning, "store", cadre::format("kind{} of line", i));
  }
  const auto lines = log.take_last();
  ASSERT_EQ(lines.size(), QueuedLog::kMaxLines + 3);
  for (size_t i = QueuedLog::kMaxLines; i < lines.size(); ++i) {
    EXPECT_TRUE(lines[i].ends_with(": 1 more lines like these")) << lines[i];
  }
}

TEST_F(QueuedLogTest, OfManyLinesOfOneKindAFewAndTheirNumberAreKept) {
  QueuedLog log(*system_, LogLevel::kWarning);
  for (int i = 0; i < 2000; ++i) {
    log.write(LogLevel::kWarning, "store", cadre::format("dropped peer={}", i));
  }
  log.write(LogLevel::kWarning, "store", "accept failed");
  std::vector<std::string> lines = log.take();
  ASSERT_EQ(lines.size(), QueuedLog::kMaxLinesOfAKind + 1);
  EXPECT_TRUE(lines[4].ends_with("store dropped peer=4")) << lines[4];
  EXPECT_TRUE(lines[5].ends_with("store accept failed")) << lines[5];
  EXPECT_TRUE(log.take().empty());
  lines = log.take_last();
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_TRUE(lines[0].starts_with("warning 2")) << lines[0];
  EXPECT_TRUE(lines[0].ends_with("Z store dropped: 1995 more lines like these")) << lines[0];
  EXPECT_TRUE(log.take_last().empty());
}

}  // namespace
}  // namespace cadre::launch
