// Log lines of the job's store, kept until the launcher's own loop shows them: whoever logs never
// waits for the reader of the launcher's output.
//
// Threads: write() from any; the rest from the owner's. Blocking: never. Lifetime: the System
// outlives it, and it outlives whoever writes. Errors: none; lines that the owner does not take in
// time are dropped and counted.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cadre/base/log.h"
#include "cadre/os/system.h"

namespace cadre::launch {

class QueuedLog final : public LogSink {
 public:
  static constexpr size_t kMaxLines = 1000;

  // Drops what is below `level`.
  QueuedLog(os::System& system, LogLevel level) : level_(level), event_(system.make_event()) {}

  void write(LogLevel level, std::string_view component, std::string_view message) override;

  // Readable while lines wait.
  os::Pollable& pollable() { return *event_; }
  // "warning 2026-11-21T10:04:11.042Z store dropped peer=..."
  std::vector<std::string> take();

 private:
  const LogLevel level_;
  const std::unique_ptr<os::Event> event_;
  std::mutex mutex_;
  std::vector<std::string> lines_;
  size_t num_dropped_ = 0;
};

}  // namespace cadre::launch
