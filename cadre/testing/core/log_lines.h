// A log sink that records warnings and errors, for tests that check them.
//
// Threads: any. Blocking: never. For tests only.
#pragma once

#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/log.h"

namespace cadre::testing {

class LogLines : public LogSink {
 public:
  void write(LogLevel level, std::string_view component, std::string_view message) override {
    if (level < LogLevel::kWarning) return;
    const std::lock_guard lock(mutex_);
    lines_.push_back(std::string(component) + " " + std::string(message));
  }
  // Returns the lines as "component message".
  std::vector<std::string> get() const {
    const std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

}  // namespace cadre::testing
