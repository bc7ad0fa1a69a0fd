#include "cadre/launch/buffered_output.h"

#include <array>

namespace cadre::launch {

void BufferedOutput::append(std::string_view bytes) {
  if (bytes.empty()) return;
  pending_.append(bytes);
  is_at_line_start_ = bytes.back() == '\n';
}

void BufferedOutput::append_line(std::string_view prefix, std::string_view line) {
  if (!is_at_line_start_) pending_.push_back('\n');
  pending_.append(prefix);
  pending_.append(line);
  pending_.push_back('\n');
  is_at_line_start_ = true;
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
