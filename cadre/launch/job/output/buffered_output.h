// A bounded buffer in front of the launcher's own output.
//
// Threads: one owner. Blocking: only drain(), until its Deadline. If the reader of the output is
// slower than the workers, the buffer fills, and the launcher stops reading from the workers. Then
// their pipes fill and they block, as if they wrote to that reader directly, while the launcher
// continues to watch them. A line may arrive in pieces. If another writer appends a line between
// two pieces, the unfinished line is ended first. A writer prevents that with claim(): all writers
// check is_claimed_by_other() before they read from their worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/core/base/deadline.h"
#include "cadre/core/os/proc/output_stream.h"
#include "cadre/core/os/system.h"
#include "cadre/launch/job/output/line_splitter.h"

namespace cadre::launch {

class BufferedOutput {
 public:
  static constexpr size_t kMaxPendingBytes = 1 << 20;

  explicit BufferedOutput(os::OutputStream::Target target) : stream_(target) {}

  // Appends bytes unchanged.
  void append(std::string_view bytes);
  // Appends a whole line. If the last line is unfinished, ends that line first.
  void append_line(std::string_view prefix, std::string_view line) {
    append_piece(nullptr, prefix, {.bytes = line});
  }
  // Continues the last line if it is an unfinished line of `writer`; otherwise begins a new line.
  void append_piece(const void* writer, std::string_view prefix, const LinePiece& piece);
  // Reserves the output: no other writer may append before `until`, or before release().
  void claim(const void* writer, TimePoint until);
  void release(const void* writer);
  bool is_claimed_by_other(const void* writer, TimePoint now) const {
    return claimant_ != nullptr && claimant_ != writer && now < claimed_until_;
  }
  TimePoint claimed_until() const { return claimed_until_; }
  // Writes as much as possible without blocking.
  void flush();
  // Writes everything, or gives up at the deadline.
  void drain(os::System& system, Deadline deadline);

  bool is_empty() const { return pending_.size() == offset_; }
  bool is_full() const { return pending_.size() - offset_ >= kMaxPendingBytes; }
  bool is_at_line_start() const { return is_at_line_start_; }
  uint64_t num_lines() const { return num_lines_; }  // the lines appended so far
  const std::optional<Error>& failure() const { return stream_.failure(); }
  bool is_terminal() const { return stream_.is_terminal(); }
  os::Pollable& pollable() { return stream_; }

 private:
  os::OutputStream stream_;
  std::string pending_;
  size_t offset_ = 0;  // the number of bytes of pending_ that were written
  bool is_at_line_start_ = true;
  uint64_t num_lines_ = 0;
  const void* line_writer_ = nullptr;  // the writer of the last line, while that line is unfinished
  const void* claimant_ = nullptr;
  TimePoint claimed_until_{};
};

}  // namespace cadre::launch
