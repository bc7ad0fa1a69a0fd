#include "cadre/launch/job/output/line_splitter.h"

#include <gtest/gtest.h>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/launch/job/output/line_tail.h"

namespace cadre::launch {
namespace {

using Lines = std::vector<std::string>;
using Returns = LineSplitter::Returns;

// Collects the lines that a reader sees. A piece that starts a line also ends an unfinished line
// before it.
class SplitLines {
 public:
  explicit SplitLines(Returns returns = Returns::kKept) : splitter_(returns) {}

  void feed(std::string_view bytes) { splitter_.feed(bytes, emit_); }
  void flush() { splitter_.flush(emit_); }
  LineSplitter& splitter() { return splitter_; }
  Lines finish() {
    splitter_.finish(emit_);
    return lines_;
  }
  const Lines& lines() const { return lines_; }
  size_t longest_piece() const { return longest_piece_; }

 private:
  void show(const LinePiece& piece) {
    longest_piece_ = std::max(longest_piece_, piece.bytes.size());
    if (piece.starts_line) lines_.emplace_back();
    lines_.back() += piece.bytes;
  }

  const LineSplitter::Emit emit_ = [this](const LinePiece& piece) { show(piece); };
  LineSplitter splitter_;
  Lines lines_;
  size_t longest_piece_ = 0;
};

Lines split(const Lines& pieces, Returns returns = Returns::kKept) {
  SplitLines lines(returns);
  for (const std::string& piece : pieces) lines.feed(piece);
  return lines.finish();
}

TEST(LineSplitter, CutsAtNewlines) {
  for (const Returns returns : {Returns::kKept, Returns::kRewriteTheLine}) {
    EXPECT_EQ(split({"a\nb\n"}, returns), (Lines{"a", "b"}));
    EXPECT_EQ(split({"a", "b\nc", "\n"}, returns), (Lines{"ab", "c"}));
    EXPECT_EQ(split({"\n\n"}, returns), (Lines{"", ""}));
    EXPECT_EQ(split({"no end"}, returns), (Lines{"no end"}));
    EXPECT_EQ(split({""}, returns), Lines{});
  }
}

// A JSON record or a row of a table must stay one piece, whether it arrives at once or in parts.
TEST(LineSplitter, ALineOfSixtyKilobytesIsOnePiece) {
  const std::string line(60'000, 'x');
  for (const size_t first : {size_t{60'000}, size_t{4'096}}) {
    SplitLines lines;
    lines.feed(line.substr(0, first));
    lines.feed(line.substr(first) + "\n");
    EXPECT_EQ(lines.longest_piece(), line.size());
    EXPECT_EQ(lines.finish(), Lines{line});
  }
}

TEST(LineSplitter, KeepsCarriageReturns) {
  EXPECT_EQ(split({"10%\r20%\r", "30%\r\n", "\rx"}), (Lines{"10%\r20%\r30%\r", "\rx"}));
}

TEST(LineSplitter, ForATerminalCarriageReturnsStartTheLineAnew) {
  const auto rewritten = [](const Lines& pieces) {
    return split(pieces, Returns::kRewriteTheLine);
  };
  EXPECT_EQ(rewritten({"10%\r20%\r30%\n"}), (Lines{"30%"}));
  EXPECT_EQ(rewritten({"\r10%", "\r20%", "\n"}), (Lines{"20%"}));
  EXPECT_EQ(rewritten({"10%\r", "20%\r", "\n"}), (Lines{"20%"}));
  EXPECT_EQ(rewritten({"ab\r", "ab", "\n"}), (Lines{"ab"}));
  EXPECT_EQ(rewritten({"dos\r\n", "dos", "\r", "\n"}), (Lines{"dos", "dos"}));
}

TEST(LineSplitter, TellsProgressOnceForEachChange) {
  SplitLines lines(Returns::kRewriteTheLine);
  LineSplitter& splitter = lines.splitter();
  lines.feed("loading");
  // There is no progress before the first carriage return rewrites the line.
  EXPECT_EQ(splitter.take_progress(), std::nullopt);
  lines.feed("\r10%");
  EXPECT_EQ(splitter.take_progress(), "10%");
  EXPECT_EQ(splitter.take_progress(), std::nullopt);
  lines.feed("\r20%\n");
  EXPECT_EQ(splitter.take_progress(), std::nullopt);
}

TEST(LineSplitter, TellsWhenTheEndOfALineWasShownAsProgress) {
  LineSplitter splitter(Returns::kRewriteTheLine);
  std::vector<bool> was_shown;
  const LineSplitter::Emit emit = [&](const LinePiece& piece) {
    was_shown.push_back(piece.was_shown);
  };
  splitter.feed("\r5/6\r6/6", emit);
  EXPECT_EQ(splitter.take_progress(), "6/6");
  splitter.feed("\n", emit);       // was shown as progress
  splitter.feed("\r6/6\n", emit);  // a new line, not shown before
  splitter.feed("\r5/6", emit);
  EXPECT_EQ(splitter.take_progress(), "5/6");
  splitter.feed("\r6/6\n", emit);  // 5/6 was shown, but not 6/6
  splitter.feed("\r6/6", emit);
  EXPECT_EQ(splitter.take_progress(), "6/6");
  splitter.finish(emit);
  EXPECT_EQ(was_shown, (std::vector<bool>{true, false, false, true}));
}

TEST(LineSplitter, FlushHandsOnWhatHasComeAndTheLineGoesOn) {
  SplitLines lines;
  lines.feed("one ");
  EXPECT_TRUE(lines.splitter().is_in_line());
  lines.flush();
  EXPECT_EQ(lines.lines(), (Lines{"one "}));
  lines.flush();
  lines.feed("two\nthree\n");
  EXPECT_FALSE(lines.splitter().is_in_line());
  EXPECT_EQ(lines.finish(), (Lines{"one two", "three"}));
}

TEST(LineSplitter, WhatWasFlushedStaysWhenTheLineStartsAnew) {
  SplitLines lines(Returns::kRewriteTheLine);
  lines.feed("10%");
  lines.flush();
  lines.feed("\r20%");
  lines.flush();  // must pass nothing on: a rewritten line is progress
  EXPECT_EQ(lines.lines(), (Lines{"10%"}));
  EXPECT_EQ(lines.splitter().take_progress(), "20%");
  lines.feed("\r30%\n");
  EXPECT_EQ(lines.finish(), (Lines{"10%", "30%"}));
}

// The lines must be the same however the bytes are divided into pieces, and no piece may exceed the
// limit.
TEST(LineSplitter, DoesNotDependOnHowTheBytesArrive) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    Lines expected;
    std::string text;
    const size_t num_lines = random.below(5);
    for (size_t i = 0; i < num_lines; ++i) {
      expected.emplace_back(random.below(3 * LineSplitter::kMaxPieceBytes),
                            static_cast<char>('a' + i));
      text += expected.back() + '\n';
    }
    SplitLines lines(seed % 2 == 0 ? Returns::kKept : Returns::kRewriteTheLine);
    for (size_t at = 0; at < text.size();) {
      const size_t size = 1 + random.below(100'000);
      lines.feed(std::string_view(text).substr(at, size));
      at += size;
    }
    ASSERT_EQ(lines.finish(), expected);
    EXPECT_LE(lines.longest_piece(), LineSplitter::kMaxPieceBytes);
  }
}

class LineTailTest : public ::testing::Test {
 protected:
  // Writes a line of the worker, adds it to the tail and shows it on `output`.
  void write(BufferedOutput& output, const std::string& line) {
    output.append_line("", line);
    tail_.add({.bytes = line}, &output);
  }

  BufferedOutput output_{os::OutputStream::Target::kStandardOutput};
  BufferedOutput error_{os::OutputStream::Target::kStandardError};
  LineTail tail_;
};

TEST_F(LineTailTest, KeepsTheLastLinesShortened) {
  for (int i = 0; i < 100; ++i) write(output_, std::to_string(i));
  write(output_, std::string(5000, 'x'));
  const auto lines = tail_.lines();
  ASSERT_EQ(lines.size(), LineTail::kMaxLines);
  EXPECT_EQ(lines.front(), "71");
  EXPECT_EQ(lines.back(), format("{}... (3000 more bytes)", std::string(2000, 'x')));
}

TEST_F(LineTailTest, PutsPiecesTogetherAndKeepsTheNewestState) {
  tail_.add({.bytes = "one ", .ends_line = false}, &output_);
  EXPECT_TRUE(tail_.lines().empty());
  tail_.add({.bytes = "line", .starts_line = false}, &output_);
  tail_.add({.bytes = "10%\r20%\r", .ends_line = false}, &output_);
  tail_.add({.bytes = "30%\r", .starts_line = false}, &output_);
  EXPECT_EQ(tail_.lines(), (std::deque<std::string>{"one line", "30%"}));
}

TEST_F(LineTailTest, CountsWhatIsStillInSight) {
  EXPECT_EQ(tail_.num_just_shown(error_), 0U);
  write(error_, "a");
  write(output_, "b");
  for (const char* line : {"c", "d", "e"}) write(error_, line);
  EXPECT_EQ(tail_.num_just_shown(error_), 3U);
  EXPECT_EQ(tail_.num_just_shown(output_), 0U);
  for (uint64_t i = 0; i < LineTail::kNearLines; ++i) error_.append_line("", "of another rank");
  EXPECT_EQ(tail_.num_just_shown(error_), 3U);
  error_.append_line("", "of another rank");
  EXPECT_EQ(tail_.num_just_shown(error_), 0U);
}

}  // namespace
}  // namespace cadre::launch
