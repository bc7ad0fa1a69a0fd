// The interface of log sinks, which write log lines.
//
// Threads: sinks may be called from any thread. Blocking: a sink may block for the time of a write.
// A log line holds level, time, rank, component and key=value pairs; the sink adds level, time and
// rank. Libraries take a LogSink& and never print to stdout.
#pragma once

#include <string_view>

#include "cadre/core/base/export.h"

namespace cadre {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

class CADRE_EXPORT LogSink {
 public:
  virtual ~LogSink() = default;
  // `component` is the name of the folder, such as "store"; `message` is one line without its
  // newline.
  virtual void write(LogLevel level, std::string_view component, std::string_view message) = 0;
};

// Returns a sink that drops every line.
CADRE_EXPORT LogSink& null_log_sink();

}  // namespace cadre
