// Passes the two output streams of one worker to the launcher's output and to log files. A log file
// gets the bytes of its stream unchanged.
//
// Threads: one owner. Blocking: while the file system works, if there are log files. Lifetime: the
// launcher's two outputs and the log files outlive the WorkerOutput. If both outputs of the
// launcher are the same, the worker has one pipe, Stream::kOutput. An unfinished line is shown if
// it has not grown for kIdle. A line that is too long for the buffer is shown in pieces. Such a
// line claims the output for at most kClaim, so that lines of other workers are not mixed into it.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "cadre/core/os/proc/pipe.h"
#include "cadre/launch/job/output/buffered_output.h"
#include "cadre/launch/job/output/job_logs.h"
#include "cadre/launch/job/output/line_splitter.h"
#include "cadre/launch/job/output/line_tail.h"

namespace cadre::launch {

struct WorkerOutputOptions {
  std::string prefix;   // the text that precedes each line
  bool is_raw = false;  // bytes are passed on unchanged, so that lines can be rewritten in place
  StreamTargets output = {};
  StreamTargets error = {};

  // Returns whether one pipe can carry both streams.
  bool may_join() const { return output.is_default() && error.is_default(); }
};

class WorkerOutput {
 public:
  static constexpr Duration kIdle = std::chrono::milliseconds(150);
  static constexpr Duration kClaim = std::chrono::seconds(5);

  WorkerOutput(WorkerOutputOptions options, BufferedOutput& output, BufferedOutput& error);

  // Reads at most the buffer's size from the worker, so that no worker starves the others; returns
  // false at the end of the stream. Reads nothing while the launcher's output is full or claimed by
  // another worker, unless the stream is not shown.
  bool pump(Stream stream, os::PipeReader& from, Bytes buffer, TimePoint now);
  // Returns whether pump() would read.
  bool has_room(Stream stream, TimePoint now) const { return may_write(lane(stream), now); }
  // Shows the current text of progress bars, which rewrite one line without ending it.
  void show_progress(TimePoint now);
  // Shows lines that have not grown for kIdle.
  void show_unfinished(TimePoint now);
  // Returns the time at which show_unfinished() or pump() must be called even without input.
  std::optional<TimePoint> next_due(TimePoint now) const;
  // Must be called when both streams have ended. Prints the last line of each stream, with a
  // newline if it has none.
  void finish();

  const LineTail& tail() const { return tail_; }

 private:
  struct Lane {
    BufferedOutput* sink;
    StreamTargets targets;
    LineSplitter splitter;
    TimePoint last_fed{};
    bool has_claimed = false;  // true while the output is claimed for the current line
    bool is_overdue = false;   // the current line was shown before its end
    bool has_ended = false;
    LineFilter::Line filtered = {};
  };
  Lane& lane(Stream stream) { return stream == Stream::kOutput ? output_ : error_; }
  const Lane& lane(Stream stream) const { return stream == Stream::kOutput ? output_ : error_; }
  static bool may_write(const Lane& lane, TimePoint now) {
    return !lane.targets.is_shown ||
           (!lane.sink->is_full() && !lane.sink->is_claimed_by_other(&lane, now));
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
