#include "cadre/launch/line_splitter.h"

#include <gtest/gtest.h>

#include "cadre/base/format.h"
#include "cadre/base/random.h"
#include "cadre/launch/line_tail.h"

namespace cadre::launch {
namespace {

std::vector<std::string> split(std::span<const std::string> pieces) {
  LineSplitter splitter;
  std::vector<std::string> lines;
  const auto emit = [&](std::string_view line) { lines.emplace_back(line); };
  for (const std::string& piece : pieces) splitter.feed(piece, emit);
  splitter.finish(emit);
  return lines;
}

using Lines = std::vector<std::string>;

TEST(LineSplitter, CutsAtNewlines) {
  EXPECT_EQ(split(Lines{"a\nb\n"}), (Lines{"a", "b"}));
  EXPECT_EQ(split(Lines{"a", "b\nc", "\n"}), (Lines{"ab", "c"}));
  EXPECT_EQ(split(Lines{"\n\n"}), (Lines{"", ""}));
  EXPECT_EQ(split(Lines{"no end"}), (Lines{"no end"}));
  EXPECT_EQ(split(Lines{""}), Lines{});
}

TEST(LineSplitter, CarriageReturnsStartTheLineAnew) {
  EXPECT_EQ(split(Lines{"10%\r20%\r30%\n"}), (Lines{"30%"}));
  EXPECT_EQ(split(Lines{"\r10%", "\r20%", "\n"}), (Lines{"20%"}));
  EXPECT_EQ(split(Lines{"10%\r", "20%\r", "\n"}), (Lines{"20%"}));
  EXPECT_EQ(split(Lines{"dos\r\n", "dos", "\r", "\n"}), (Lines{"dos", "dos"}));
}

TEST(LineSplitter, TellsProgressOnceForEachChange) {
  LineSplitter splitter;
  const auto ignore = [](std::string_view) {};
  splitter.feed("loading", ignore);
  EXPECT_EQ(splitter.take_progress(), std::nullopt);  // it does not rewrite itself
  splitter.feed("\r10%", ignore);
  EXPECT_EQ(splitter.take_progress(), "10%");
  EXPECT_EQ(splitter.take_progress(), std::nullopt);
  splitter.feed("\r20%\n", ignore);
  EXPECT_EQ(splitter.take_progress(), std::nullopt);
}

// Whatever the bytes and however they arrive: the same lines, none over the bound, no byte lost.
TEST(LineSplitter, DoesNotDependOnHowTheBytesArrive) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    std::string text;
    const size_t num_lines = random.below(5);
    for (size_t i = 0; i < num_lines; ++i) {
      text.append(random.below(3 * LineSplitter::kMaxLineBytes), static_cast<char>('a' + i));
      text += '\n';
    }
    Lines pieces;
    for (size_t at = 0; at < text.size();) {
      const size_t size = 1 + random.below(100'000);
      pieces.push_back(text.substr(at, size));
      at += size;
    }
    const Lines lines = split(pieces);
    size_t num_bytes = 0;
    for (const std::string& line : lines) {
      EXPECT_LE(line.size(), LineSplitter::kMaxLineBytes);
      num_bytes += line.size();
    }
    EXPECT_EQ(num_bytes, text.size() - num_lines);
  }
}

TEST(LineTail, KeepsTheLastLinesShortened) {
  LineTail tail;
  for (int i = 0; i < 100; ++i) tail.add(std::to_string(i));
  tail.add(std::string(5000, 'x'));
  ASSERT_EQ(tail.lines().size(), LineTail::kMaxLines);
  EXPECT_EQ(tail.lines().front(), "71");
  EXPECT_EQ(tail.lines().back(), format("{}... (3000 more bytes)", std::string(2000, 'x')));
}

}  // namespace
}  // namespace cadre::launch
