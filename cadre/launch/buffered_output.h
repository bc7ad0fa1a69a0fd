// What waits to be written to the launcher's own output, bounded.
//
// Threads: one owner. Blocking: only drain(), until its Deadline.
// When the reader of our output is slower than the workers, the buffer fills; the launcher then
// reads no more from the workers, whose pipes fill in turn: they wait, as they would if they wrote
// to that reader themselves, and the launcher goes on watching them.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/base/deadline.h"
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
  void append_line(std::string_view prefix, std::string_view line);
  // Writes what the reader takes just now.
  void flush();
  // Writes everything, or gives up at the deadline.
  void drain(os::System& system, Deadline deadline);

  bool is_empty() const { return pending_.size() == offset_; }
  bool is_full() const { return pending_.size() - offset_ >= kMaxPendingBytes; }
  bool is_at_line_start() const { return is_at_line_start_; }
  const std::optional<Error>& failure() const { return stream_.failure(); }
  bool is_terminal() const { return stream_.is_terminal(); }
  os::Pollable& pollable() { return stream_; }

 private:
  os::OutputStream stream_;
  std::string pending_;
  size_t offset_ = 0;  // bytes of pending_ that were written
  bool is_at_line_start_ = true;
};

}  // namespace cadre::launch
