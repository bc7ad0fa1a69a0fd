// What waits to be written to the launcher's own output, bounded.
//
// Threads: one owner. Blocking: only drain(), until its Deadline.
// When the reader of our output is slower than the workers, the buffer fills; the launcher then
// reads no more from the workers, whose pipes fill in turn: they wait, as they would if they wrote
// to that reader themselves, and the launcher goes on watching them.
// A line may come in pieces. Another writer's line then ends it, unless the first one has claimed
// the output: all writers look at is_claimed_by_other() before they take what they would write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/base/deadline.h"
#include "cadre/launch/line_splitter.h"
#include "cadre/os/proc/output_stream.h"
#include "cadre/os/system.h"

namespace cadre::launch {

class BufferedOutput {
 public:
  static constexpr size_t kMaxPendingBytes = 1 << 20;

  explicit BufferedOutput(os::OutputStream::Target target) : stream_(target) {}

  // Bytes as they are.
  void append(std::string_view bytes);
  // A line of its own: the one before it is ended first if it is not.
  void append_line(std::string_view prefix, std::string_view line) {
    append_piece(nullptr, prefix, {.bytes = line});
  }
  // Goes on with the writer's line if that is the last one, else begins a line.
  void append_piece(const void* writer, std::string_view prefix, const LinePiece& piece);
  // Until then nobody else is to write.
  void claim(const void* writer, TimePoint until);
  void release(const void* writer);
  bool is_claimed_by_other(const void* writer, TimePoint now) const {
    return claimant_ != nullptr && claimant_ != writer && now < claimed_until_;
  }
  TimePoint claimed_until() const { return claimed_until_; }
  // Writes what the reader takes just now.
  void flush();
  // Writes everything, or gives up at the deadline.
  void drain(os::System& system, Deadline deadline);

  bool is_empty() const { return pending_.size() == offset_; }
  bool is_full() const { return pending_.size() - offset_ >= kMaxPendingBytes; }
  bool is_at_line_start() const { return is_at_line_start_; }
  uint64_t num_lines() const { return num_lines_; }  // that were appended
  const std::optional<Error>& failure() const { return stream_.failure(); }
  bool is_terminal() const { return stream_.is_terminal(); }
  os::Pollable& pollable() { return stream_; }

 private:
  os::OutputStream stream_;
  std::string pending_;
  size_t offset_ = 0;  // bytes of pending_ that were written
  bool is_at_line_start_ = true;
  uint64_t num_lines_ = 0;
  const void* line_writer_ = nullptr;  // of the last line, while it is unfinished
  const void* claimant_ = nullptr;
  TimePoint claimed_until_{};
};

}  // namespace cadre::launch
