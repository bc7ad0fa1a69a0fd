// Log lines on standard error: level, time, rank, component, and the event as key=value.
//
// Threads: any. Blocking: for the time of a write. Errors: none; a line that cannot be written is
// lost. "warning 2026-11-21T10:00:00.123Z rank=2 store dropped peer=10.0.0.7 reason=..."
#pragma once

#include <memory>

#include "cadre/core/base/export.h"
#include "cadre/core/base/log.h"
#include "cadre/core/base/types.h"

namespace cadre::os {

class CADRE_EXPORT StderrLog final : public LogSink {
 public:
  // Drops lines below `level`.
  StderrLog(LogLevel level, Rank rank);
  ~StderrLog() override;

  void write(LogLevel level, std::string_view component, std::string_view message) override;

 private:
  class Impl;  // keeps the logging library out of this header

  const std::unique_ptr<Impl> impl_;
};

}  // namespace cadre::os
