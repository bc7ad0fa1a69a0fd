// The program's log sink as threads and destructors of the library use it: an exception of the sink
// is dropped together with the line, because nobody could catch it there.
//
// Threads: any. Blocking: same as the sink. Lifetime: borrows or shares the sink. Errors: none.
#pragma once

#include <memory>
#include <string_view>
#include <utility>

#include "cadre/core/base/log.h"

namespace cadre {

class QuietLog final : public LogSink {
 public:
  // If `borrowed` is null, every line is dropped.
  explicit QuietLog(LogSink* borrowed) : sink_(borrowed) {}
  explicit QuietLog(std::shared_ptr<LogSink> shared)
      : sink_(shared.get()), shared_(std::move(shared)) {}

  void write(LogLevel level, std::string_view component,
             std::string_view message) noexcept override {
    if (sink_ == nullptr) return;
    try {
      sink_->write(level, component, message);
    } catch (...) {
      // The header says that the line is dropped.
    }
  }

 private:
  LogSink* const sink_;
  const std::shared_ptr<LogSink> shared_;  // null if the sink is borrowed
};

}  // namespace cadre
