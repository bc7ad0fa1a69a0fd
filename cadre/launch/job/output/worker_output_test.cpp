// Tests when a line of a worker is shown, and which lines of other workers wait until it has ended.
// The tests inspect the buffers and flush none of them.
#include "cadre/launch/job/output/worker_output.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cadre::launch {
namespace {

using std::chrono::milliseconds;

constexpr TimePoint kNow{1'000'000'000};

// A worker's output pipe with the WorkerOutput that passes its lines on.
class Worker {
 public:
  Worker(std::string prefix, BufferedOutput& output, BufferedOutput& error)
      : Worker(os::make_pipe().value_or_throw(), std::move(prefix), output, error) {}

  // Writes the text to the worker's pipe and pumps it to the output. Returns false at the end of
  // the stream.
  bool say(std::string_view text, TimePoint now) {
    EXPECT_EQ(::write(writer_.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
    return pump(now);
  }
  bool end(TimePoint now) {
    writer_.close();
    return pump(now);
  }
  WorkerOutput& lines() { return lines_; }

 private:
  Worker(os::Pipe pipe, std::string prefix, BufferedOutput& output, BufferedOutput& error)
      : reader_(std::move(pipe.read_end)),
        writer_(std::move(pipe.write_end)),
        lines_({.prefix = std::move(prefix)}, output, error) {}

  bool pump(TimePoint now) { return lines_.pump(Stream::kOutput, reader_, buffer_, now); }

  os::PipeReader reader_;
  os::Fd writer_;
  WorkerOutput lines_;
  std::vector<std::byte> buffer_ = std::vector<std::byte>(size_t{1} << 17);
};

class WorkerOutputTest : public ::testing::Test {
 protected:
  BufferedOutput output_{os::OutputStream::Target::kStandardError};
  BufferedOutput error_{os::OutputStream::Target::kStandardError};
  Worker worker_{"[0] ", output_, error_};
  Worker other_{"[1] ", output_, error_};
};

TEST_F(WorkerOutputTest, AnUnfinishedLineIsShownWhenItHasNotGrownForAMoment) {
  EXPECT_TRUE(worker_.say("a line\npart", kNow));
  EXPECT_EQ(output_.num_lines(), 1U);
  EXPECT_TRUE(output_.is_at_line_start());
  EXPECT_EQ(worker_.lines().next_due(kNow), std::optional(kNow + WorkerOutput::kIdle));
  worker_.lines().show_unfinished(kNow + (WorkerOutput::kIdle - milliseconds(1)));
  EXPECT_TRUE(output_.is_at_line_start());
  worker_.lines().show_unfinished(kNow + WorkerOutput::kIdle);
  EXPECT_FALSE(output_.is_at_line_start());
  EXPECT_EQ(worker_.lines().next_due(kNow + WorkerOutput::kIdle), std::nullopt);
  EXPECT_TRUE(worker_.say(" is whole\n", kNow + milliseconds(200)));
  EXPECT_TRUE(output_.is_at_line_start());
  EXPECT_EQ(output_.num_lines(), 2U);
}

TEST_F(WorkerOutputTest, TheEndOfTheStreamEndsTheLine) {
  EXPECT_TRUE(worker_.say("no newline", kNow));
  EXPECT_TRUE(output_.is_empty());
  EXPECT_FALSE(worker_.end(kNow));
  EXPECT_EQ(output_.num_lines(), 1U);
  EXPECT_TRUE(output_.is_at_line_start());
}

TEST_F(WorkerOutputTest, ALineThatIsTooLongForAPieceKeepsOthersOutForFiveSeconds) {
  // The line is written in two parts, because a pipe has room for 64 KiB only.
  EXPECT_TRUE(worker_.say(std::string(LineSplitter::kMaxPieceBytes - 1, 'x'), kNow));
  EXPECT_TRUE(other_.lines().has_room(Stream::kOutput, kNow));
  EXPECT_TRUE(worker_.say(std::string(100, 'x'), kNow));
  EXPECT_FALSE(other_.lines().has_room(Stream::kOutput, kNow));
  EXPECT_TRUE(worker_.lines().has_room(Stream::kOutput, kNow));
  EXPECT_EQ(other_.lines().next_due(kNow), std::optional(kNow + WorkerOutput::kClaim));
  EXPECT_TRUE(other_.lines().has_room(Stream::kOutput, kNow + WorkerOutput::kClaim));
  EXPECT_TRUE(worker_.say("\n", kNow));
  EXPECT_TRUE(other_.lines().has_room(Stream::kOutput, kNow));
}

}  // namespace
}  // namespace cadre::launch
