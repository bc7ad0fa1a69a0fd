#include "cadre/launch/queued_log.h"

#include <utility>

#include "cadre/base/format.h"
#include "cadre/os/host/wall_clock.h"
#include "cadre/rendezvous/job_environment.h"

namespace cadre::launch {

void QueuedLog::write(LogLevel level, std::string_view component, std::string_view message) {
  if (level < level_ || level == LogLevel::kOff) return;
  {
    const std::lock_guard lock(mutex_);
    if (lines_.size() >= kMaxLines) {
      ++num_dropped_;
      return;
    }
    lines_.push_back(cadre::format("{} {} {} {}", log_level_name(level), os::wall_clock_text(),
                                   component, message));
  }
  event_->notify();
}

std::vector<std::string> QueuedLog::take() {
  event_->clear();  // before the look: a line that comes later makes it readable again
  std::vector<std::string> lines;
  const std::lock_guard lock(mutex_);
  lines.swap(lines_);
  if (num_dropped_ > 0) {
    lines.push_back(cadre::format("warning {} launch dropped log lines={}", os::wall_clock_text(),
                                  std::exchange(num_dropped_, 0)));
  }
  return lines;
}

}  // namespace cadre::launch
