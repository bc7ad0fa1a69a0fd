// One worker's two streams on their way to the launcher's output.
//
// Threads: one owner. Blocking: never. Lifetime: the two outputs outlive it.
// If both outputs are the same, so is the worker's pipe: everything goes through Stream::kOutput.
// An unfinished line is shown when nothing was added to it for kIdle. A line that is too long to be
// kept claims the output for at most kClaim, so that lines of other workers wait for its end.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "cadre/launch/buffered_output.h"
#include "cadre/launch/line_splitter.h"
#include "cadre/launch/line_tail.h"
#include "cadre/os/proc/pipe.h"

namespace cadre::launch {

struct WorkerOutputOptions {
  std::string prefix;   // before each line
  bool is_raw = false;  // bytes pass as they are, so that a line can rewrite itself in place
};

class WorkerOutput {
 public:
  static constexpr Duration kIdle = std::chrono::milliseconds(150);
  static constexpr Duration kClaim = std::chrono::seconds(5);

  WorkerOutput(WorkerOutputOptions options, BufferedOutput& output, BufferedOutput& error);

  enum class Stream { kOutput, kError };
  // Takes what the worker wrote, at most 64 KiB, so that no worker starves the others; false when
  // the stream has ended. Takes nothing while the launcher's output is full or claimed by another
  // worker.
  bool pump(Stream stream, os::PipeReader& from, TimePoint now);
  // Whether pump() would take anything.
  bool has_room(Stream stream, TimePoint now) const { return may_write(lane(stream), now); }
  // Shows the state of progress bars, which end no line for a long time.
  void show_progress(TimePoint now);
  // Shows lines whose end has not come for a while.
  void show_unfinished(TimePoint now);
  // When show_unfinished() or pump() is to be called although no byte has come.
  std::optional<TimePoint> next_due(TimePoint now) const;
  // Ends lines that have no newline: nothing more will come.
  void finish();

  const LineTail& tail() const { return tail_; }

 private:
  struct Lane {
    BufferedOutput* sink;
    LineSplitter splitter;
    TimePoint last_fed{};
    bool has_claimed = false;  // the output, for the current line
    bool is_overdue = false;   // what has come of the current line was shown
    bool has_ended = false;
  };
  Lane& lane(Stream stream) { return stream == Stream::kOutput ? output_ : error_; }
  const Lane& lane(Stream stream) const { return stream == Stream::kOutput ? output_ : error_; }
  static bool may_write(const Lane& lane, TimePoint now) {
    return !lane.sink->is_full() && !lane.sink->is_claimed_by_other(&lane, now);
  }
  void show(Lane& lane, const LinePiece& piece);
  void finish_lane(Lane& lane);
  void feed(Lane& lane, std::string_view bytes, TimePoint now);

  const WorkerOutputOptions options_;
  Lane output_;
  Lane error_;
  LineTail tail_;
};

}  // namespace cadre::launch
