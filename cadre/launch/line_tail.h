// The last lines that a worker wrote, kept for the report of its failure.
//
// Threads: one owner. Blocking: never. Memory: at most kMaxLines times kMaxLineBytes.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

#include "cadre/base/format.h"

namespace cadre::launch {

class LineTail {
 public:
  static constexpr size_t kMaxLines = 30;
  static constexpr size_t kMaxLineBytes = 2000;

  void add(std::string_view line) {
    if (lines_.size() == kMaxLines) lines_.pop_front();
    if (line.size() <= kMaxLineBytes) {
      lines_.emplace_back(line);
    } else {
      lines_.push_back(std::string(line.substr(0, kMaxLineBytes)) +
                       cadre::format("... ({} more bytes)", line.size() - kMaxLineBytes));
    }
  }

  const std::deque<std::string>& lines() const { return lines_; }

 private:
  std::deque<std::string> lines_;
};

}  // namespace cadre::launch
