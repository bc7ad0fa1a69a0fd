// Tests how lines of several writers are separated. The tests count the lines in the buffer and
// never call flush(), so nothing is written.
#include "cadre/launch/job/output/buffered_output.h"

#include <gtest/gtest.h>

#include <string>

namespace cadre::launch {
namespace {

constexpr TimePoint kTime{1'000'000'000};

class BufferedOutputTest : public ::testing::Test {
 protected:
  BufferedOutput output_{os::OutputStream::Target::kStandardError};
  const int first_ = 0;
  const int second_ = 0;
};

TEST_F(BufferedOutputTest, CountsTheLinesThatEnded) {
  EXPECT_TRUE(output_.is_empty());
  output_.append("one\ntwo\nthr");
  EXPECT_EQ(output_.num_lines(), 2U);
  EXPECT_FALSE(output_.is_at_line_start());
  output_.append("");
  EXPECT_FALSE(output_.is_at_line_start());
  output_.append_line("[0] ", "three");
  EXPECT_EQ(output_.num_lines(), 3U);
  EXPECT_TRUE(output_.is_at_line_start());
}

TEST_F(BufferedOutputTest, TheNewlineOfALineThatAnotherHasEndedIsDropped) {
  const LinePiece begin{.bytes = "a", .ends_line = false};
  const LinePiece end{.bytes = "", .starts_line = false};
  output_.append_piece(&first_, "[0] ", begin);
  output_.append_piece(&first_, "[0] ", end);
  EXPECT_EQ(output_.num_lines(), 1U);
  output_.append_piece(&first_, "[0] ", begin);
  output_.append_piece(&second_, "[1] ", {.bytes = "b"});
  EXPECT_EQ(output_.num_lines(), 2U);
  output_.append_piece(&first_, "[0] ", end);
  EXPECT_EQ(output_.num_lines(), 2U);
  EXPECT_TRUE(output_.is_at_line_start());
}

TEST_F(BufferedOutputTest, AClaimKeepsOthersOutUntilItsTimeOrItsRelease) {
  output_.claim(&first_, kTime);
  const TimePoint before = kTime + std::chrono::nanoseconds(-1);
  EXPECT_TRUE(output_.is_claimed_by_other(&second_, before));
  EXPECT_FALSE(output_.is_claimed_by_other(&first_, before));
  EXPECT_FALSE(output_.is_claimed_by_other(&second_, kTime));
  output_.release(&second_);
  EXPECT_TRUE(output_.is_claimed_by_other(&second_, before));
  output_.release(&first_);
  EXPECT_FALSE(output_.is_claimed_by_other(&second_, before));
}

TEST_F(BufferedOutputTest, IsFullAtAMebibyte) {
  output_.append(std::string(BufferedOutput::kMaxPendingBytes - 1, 'x'));
  EXPECT_FALSE(output_.is_full());
  output_.append("x");
  EXPECT_TRUE(output_.is_full());
}

}  // namespace
}  // namespace cadre::launch
