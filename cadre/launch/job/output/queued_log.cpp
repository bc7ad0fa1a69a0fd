#include "cadre/launch/job/output/queued_log.h"

#include <cstdint>
#include <limits>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/host/wall_clock.h"
#include "cadre/core/rendezvous/job_environment.h"

namespace cadre::launch {

void QueuedLog::write(LogLevel level, std::string_view component, std::string_view message) {
  if (level < level_ || level == LogLevel::kOff) return;
  const std::string_view first_word = message.substr(0, message.find(' '));
  {
    const std::lock_guard lock(mutex_);
    const TimePoint now = system_.now();
    if (lines_.size() < kMaxLines) count_dropped(now);
    Kind& kind =
        kinds_[{std::string(log_level_name(level)), cadre::format("{} {}", component, first_word)}];
    if (kind.num_lines == 0) kind.interval_end = now + kInterval;
    if (++kind.num_lines > kMaxLinesOfAKind || lines_.size() >= kMaxLines) {
      ++kind.num_dropped;
      return;
    }
    lines_.push_back(cadre::format("{} {} {} {}", log_level_name(level), os::wall_clock_text(),
                                   component, message));
  }
  event_->notify();
}

void QueuedLog::count_dropped(TimePoint until) {
  std::erase_if(kinds_, [&](const auto& entry) {
    const auto& [name, kind] = entry;
    if (until < kind.interval_end) return false;
    if (kind.num_dropped > 0) {
      lines_.push_back(cadre::format("{} {} {}: {} more lines like these", name.first,
                                     os::wall_clock_text(), name.second, kind.num_dropped));
    }
    return true;
  });
}

std::vector<std::string> QueuedLog::take() {
  return take_counted(system_.now());
}

std::vector<std::string> QueuedLog::take_last() {
  return take_counted(TimePoint{.ns = std::numeric_limits<int64_t>::max()});
}

std::vector<std::string> QueuedLog::take_counted(TimePoint until) {
  event_->clear();  // cleared first: a line that is written later sets it again
  std::vector<std::string> lines;
  const std::lock_guard lock(mutex_);
  count_dropped(until);
  lines.swap(lines_);
  return lines;
}

}  // namespace cadre::launch
