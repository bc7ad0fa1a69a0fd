#include "cadre/launch/line_splitter.h"

#include <algorithm>
#include <utility>

namespace cadre::launch {
namespace {

// What a terminal would show of a line that may hold carriage returns.
std::string_view visible_part(std::string_view line) {
  while (line.ends_with('\r')) line.remove_suffix(1);
  const size_t last_return = line.rfind('\r');
  return last_return == std::string_view::npos ? line : line.substr(last_return + 1);
}

}  // namespace

void LineSplitter::feed(std::string_view bytes, const Emit& emit) {
  while (!bytes.empty()) {
    const size_t newline = bytes.find('\n');
    if (newline == std::string_view::npos) return keep(bytes, emit);
    if (partial_.empty() && newline <= kMaxLineBytes) {
      emit(visible_part(bytes.substr(0, newline)));  // the common case copies nothing
    } else {
      keep(bytes.substr(0, newline), emit);
      emit(visible_part(partial_));
      partial_.clear();
    }
    has_new_progress_ = false;
    bytes.remove_prefix(newline + 1);
  }
}

void LineSplitter::keep(std::string_view bytes, const Emit& emit) {
  while (!bytes.empty()) {
    const size_t room = kMaxLineBytes - partial_.size();
    const std::string_view taken = bytes.substr(0, room);
    partial_.append(taken);
    bytes.remove_prefix(taken.size());
    const std::string_view shown = visible_part(partial_);
    if (shown.size() < partial_.size()) {
      // A trailing carriage return stays: the next byte decides whether the line starts anew.
      const bool ends_with_return = partial_.ends_with('\r');
      partial_ = std::string(shown) + (ends_with_return ? "\r" : "");
      has_new_progress_ = true;
    }
    if (partial_.size() == kMaxLineBytes) {
      emit(partial_);
      partial_.clear();
    }
  }
}

void LineSplitter::finish(const Emit& emit) {
  if (!partial_.empty()) emit(visible_part(partial_));
  partial_.clear();
  has_new_progress_ = false;
}

std::optional<std::string> LineSplitter::take_progress() {
  if (!std::exchange(has_new_progress_, false)) return std::nullopt;
  return std::string(visible_part(partial_));
}

}  // namespace cadre::launch
