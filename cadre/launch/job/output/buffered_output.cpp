#include "cadre/launch/job/output/buffered_output.h"

#include <algorithm>
#include <array>

namespace cadre::launch {

void BufferedOutput::append(std::string_view bytes) {
  if (bytes.empty()) return;
  pending_.append(bytes);
  is_at_line_start_ = bytes.back() == '\n';
  num_lines_ += static_cast<uint64_t>(std::ranges::count(bytes, '\n'));
  line_writer_ = nullptr;
}

void BufferedOutput::append_piece(const void* writer, std::string_view prefix,
                                  const LinePiece& piece) {
  const bool goes_on = !piece.starts_line && line_writer_ != nullptr && line_writer_ == writer;
  if (!goes_on) {
    // The piece is only the newline of an unfinished line, which was already ended when another
    // writer appended a line.
    if (!piece.starts_line && piece.bytes.empty()) return;
    if (!is_at_line_start_) pending_.push_back('\n');
    pending_.append(prefix);
  }
  pending_.append(piece.bytes);
  if (piece.ends_line) {
    pending_.push_back('\n');
    ++num_lines_;
  }
  is_at_line_start_ = piece.ends_line;
  line_writer_ = piece.ends_line ? nullptr : writer;
}

void BufferedOutput::claim(const void* writer, TimePoint until) {
  claimant_ = writer;
  claimed_until_ = until;
}

void BufferedOutput::release(const void* writer) {
  if (claimant_ == writer) claimant_ = nullptr;
}

void BufferedOutput::flush() {
  offset_ += stream_.try_write(std::string_view(pending_).substr(offset_));
  if (is_empty() || offset_ >= kMaxPendingBytes) {
    pending_.erase(0, offset_);
    offset_ = 0;
  }
}

void BufferedOutput::drain(os::System& system, Deadline deadline) {
  flush();
  while (!is_empty() && !deadline.has_passed(system.now())) {
    std::array items{os::PollItem{.target = &stream_, .want_write = true}};
    system.poll(items, deadline);
    flush();
  }
}

}  // namespace cadre::launch
