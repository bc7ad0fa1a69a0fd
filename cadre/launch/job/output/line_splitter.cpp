#include "cadre/launch/job/output/line_splitter.h"

#include <utility>

namespace cadre::launch {

std::string_view visible_part(std::string_view line) {
  while (line.ends_with('\r')) line.remove_suffix(1);
  const size_t last_return = line.rfind('\r');
  return last_return == std::string_view::npos ? line : line.substr(last_return + 1);
}

void LineSplitter::pass_on(std::string_view bytes, bool ends_line, const Emit& emit) {
  const std::string_view shown = returns_ == Returns::kKept ? bytes : visible_part(bytes);
  // If a piece of the line was already passed on when a carriage return restarts it, that piece
  // stays a line of its own.
  emit({.bytes = shown,
        .starts_line = !is_open_ || rewrites_itself_,
        .ends_line = ends_line,
        .was_shown = ends_line && rewrites_itself_ && shown == shown_progress_});
  shown_progress_.clear();
  is_open_ = !ends_line;
  rewrites_itself_ = false;
  has_new_progress_ = false;
}

void LineSplitter::feed(std::string_view bytes, const Emit& emit) {
  while (!bytes.empty()) {
    const size_t newline = bytes.find('\n');
    if (newline == std::string_view::npos) return keep(bytes, emit);
    if (!is_in_line() && newline <= kMaxPieceBytes) {
      pass_on(bytes.substr(0, newline), true, emit);  // the common case: no copy
    } else {
      keep(bytes.substr(0, newline), emit);
      pass_on(partial_, true, emit);
      partial_.clear();
    }
    bytes.remove_prefix(newline + 1);
  }
}

void LineSplitter::keep(std::string_view bytes, const Emit& emit) {
  while (!bytes.empty()) {
    const std::string_view taken = bytes.substr(0, kMaxPieceBytes - partial_.size());
    partial_.append(taken);
    bytes.remove_prefix(taken.size());
    if (returns_ == Returns::kRewriteTheLine) rewrite();
    if (partial_.size() == kMaxPieceBytes) {
      pass_on(partial_, false, emit);
      partial_.clear();
    }
  }
}

void LineSplitter::rewrite() {
  // A trailing carriage return stays pending: the next byte decides whether the line restarts.
  const bool ends_with_return = partial_.ends_with('\r');
  const std::string_view shown = visible_part(partial_);
  has_new_progress_ = has_new_progress_ || shown.size() < partial_.size();
  if (shown.data() != partial_.data()) {
    partial_ = std::string(shown) + (ends_with_return ? "\r" : "");
    rewrites_itself_ = true;
  }
}

void LineSplitter::flush(const Emit& emit) {
  if (partial_.empty() || rewrites_itself_ || is_after_return()) return;
  pass_on(partial_, false, emit);
  partial_.clear();
}

void LineSplitter::finish(const Emit& emit) {
  if (is_in_line()) pass_on(partial_, true, emit);
  partial_.clear();
}

std::optional<std::string> LineSplitter::take_progress() {
  if (!std::exchange(has_new_progress_, false)) return std::nullopt;
  return shown_progress_ = std::string(visible_part(partial_));
}

}  // namespace cadre::launch
