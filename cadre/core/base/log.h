// A log line and the interface of whatever writes it.
//
// Threads: sinks may be called from any thread. Blocking: a sink may block for the time of a write.
// One line = level, time, rank, component, key=value; the sink adds level, time and rank. Libraries
// take a LogSink& and never print to stdout.
#pragma once

#include <memory>
#include <string_view>
#include <utility>

#include "cadre/core/base/export.h"

namespace cadre {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

class CADRE_EXPORT LogSink {
 public:
  virtual ~LogSink() = default;
  // `component` is the folder ("store"), `message` one line without its newline.
  virtual void write(LogLevel level, std::string_view component, std::string_view message) = 0;
};

// A sink that drops every line.
CADRE_EXPORT LogSink& null_log_sink();

// A log of the program as threads and destructors of the library use it: what the sink throws is
// dropped with its line, because nobody could catch it there.
class QuietLog final : public LogSink {
 public:
  // null: every line is dropped.
  explicit QuietLog(LogSink* borrowed) : sink_(borrowed) {}
  explicit QuietLog(std::shared_ptr<LogSink> shared)
      : sink_(shared.get()), shared_(std::move(shared)) {}

  void write(LogLevel level, std::string_view component,
             std::string_view message) noexcept override {
    if (sink_ == nullptr) return;
    try {
      sink_->write(level, component, message);
    } catch (...) {
      // Dropped, as the header says.
    }
  }

 private:
  LogSink* const sink_;
  const std::shared_ptr<LogSink> shared_;  // null if the sink is borrowed
};

}  // namespace cadre
