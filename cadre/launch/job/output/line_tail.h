// The last lines that a worker wrote, kept for the report of its failure.
//
// Threads: one owner. Blocking: never. Memory: about kMaxLines times kMaxLineBytes.
// Lifetime: pointers to the outputs on which lines were shown are compared, never dereferenced.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/launch/job/output/buffered_output.h"
#include "cadre/launch/job/output/line_splitter.h"

namespace cadre::launch {

class LineTail {
 public:
  static constexpr size_t kMaxLines = 30;
  static constexpr size_t kMaxLineBytes = 2000;
  // A line is considered to be still in sight if at most this many lines of other ranks were shown
  // after it. The report does not repeat such a line.
  static constexpr uint64_t kNearLines = 10;

  // Adds a piece that was just shown on `shown_on`; null if it was not shown. For a line that
  // carriage returns rewrite in place, only the last text is kept.
  void add(const LinePiece& piece, const BufferedOutput* shown_on) {
    line_.append(piece.bytes);
    const std::string_view visible = visible_part(line_);
    if (visible.data() != line_.data()) {
      line_ = std::string(visible) + (line_.ends_with('\r') ? "\r" : "");
      num_more_bytes_ = 0;
    }
    if (line_.size() > kMaxLineBytes) {
      num_more_bytes_ += line_.size() - kMaxLineBytes;
      line_.resize(kMaxLineBytes);
    }
    if (piece.ends_line) end_line(shown_on);
  }

  std::deque<std::string> lines() const {
    std::deque<std::string> texts;
    for (const Line& line : lines_) texts.push_back(line.text);
    return texts;
  }

  // Returns how many of the last lines are still in sight on `output`: at most kNearLines lines of
  // other ranks were shown after them.
  size_t num_just_shown(const BufferedOutput& output) const {
    size_t num_shown = 0;
    for (size_t count = 1; count <= lines_.size(); ++count) {
      const Line& line = lines_[lines_.size() - count];
      if (line.shown_on != &output) break;
      if (output.num_lines() - line.line_number <= count - 1 + kNearLines) num_shown = count;
    }
    return num_shown;
  }

 private:
  struct Line {
    std::string text;
    const BufferedOutput* shown_on;
    uint64_t line_number;  // the number of the line on `shown_on`; 0 if it was not shown
  };

  void end_line(const BufferedOutput* shown_on) {
    line_ = std::string(visible_part(line_));
    if (num_more_bytes_ > 0) line_ += cadre::format("... ({} more bytes)", num_more_bytes_);
    if (lines_.size() == kMaxLines) lines_.pop_front();
    lines_.push_back({std::move(line_), shown_on, shown_on == nullptr ? 0 : shown_on->num_lines()});
    line_.clear();
    num_more_bytes_ = 0;
  }

  std::deque<Line> lines_;
  std::string line_;  // a line that is not finished
  uint64_t num_more_bytes_ = 0;
};

}  // namespace cadre::launch
