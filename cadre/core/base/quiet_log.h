// Wraps the program's log sink for the library's threads and destructors: if the sink throws, the
// exception is dropped together with the line, because no caller could catch it there.
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
      // Drops the line, because no caller could handle the exception.
    }
  }

 private:
  LogSink* const sink_;
  const std::shared_ptr<LogSink> shared_;  // null if the sink is borrowed
};

}  // namespace cadre
