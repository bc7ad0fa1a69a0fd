// Queues log lines of the job's store for the launcher's loop, which shows them, so that the
// writing thread never waits for the reader of the launcher's output. If there are many lines of
// one kind, only the first few are kept, and the others are counted. Lines are of one kind if
// level, component and the first word of the message are equal.
//
// Threads: write() from any thread; the other methods from the owner's thread. Blocking: never.
// Lifetime: the System outlives it, and it outlives its writers. Lines beyond kMaxLinesOfAKind in
// one kInterval are dropped and counted, and so are lines for which the queue has no room because
// the owner has not taken the earlier ones.
#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/log.h"
#include "cadre/core/os/system.h"

namespace cadre::launch {

class QueuedLog final : public LogSink {
 public:
  static constexpr size_t kMaxLines = 100;
  static constexpr size_t kMaxLinesOfAKind = 5;
  static constexpr Duration kInterval = std::chrono::seconds(10);

  // Drops lines below `level`.
  QueuedLog(os::System& system, LogLevel level)
      : system_(system), level_(level), event_(system.make_event()) {}

  void write(LogLevel level, std::string_view component, std::string_view message) override;

  // Returns an object that is readable while there are queued lines.
  os::Pollable& pollable() { return *event_; }
  // Returns lines such as "warning 2026-11-21T10:04:11.042Z store dropped peer=...", and the counts
  // of dropped lines of past intervals: "warning 2026-11-21T10:04:21.042Z store dropped: 1995 more
  // lines like these".
  std::vector<std::string> take();
  // Does the same as take() and adds the counts of the current interval. The launcher calls it at
  // the end of the job.
  std::vector<std::string> take_last();

 private:
  struct Kind {
    TimePoint interval_end{};
    size_t num_lines = 0;    // the number of lines in this interval
    size_t num_dropped = 0;  // the number of lines that were dropped in this interval
  };
  // Appends a line with the number of dropped lines for each kind whose interval ends at `until` or
  // earlier.
  void count_dropped(TimePoint until);
  std::vector<std::string> take_counted(TimePoint until);

  os::System& system_;
  const LogLevel level_;
  const std::unique_ptr<os::Event> event_;
  std::mutex mutex_;
  std::vector<std::string> lines_;
  // The key is the level with the text "component first-word".
  std::map<std::pair<std::string, std::string>, Kind> kinds_;
};

}  // namespace cadre::launch
