// One worker's two streams on their way to the launcher's output.
//
// Threads: one owner. Blocking: never. Lifetime: the two outputs outlive it.
#pragma once

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
  WorkerOutput(WorkerOutputOptions options, BufferedOutput& output, BufferedOutput& error);

  enum class Stream { kOutput, kError };
  // Takes what the worker wrote, at most 64 KiB, so that no worker starves the others; false when
  // the stream has ended. Takes nothing while the launcher's output is full.
  bool pump(Stream stream, os::PipeReader& from);
  // Whether pump() would take anything.
  bool has_room(Stream stream) const { return !lane(stream).sink->is_full(); }
  // Shows the state of progress bars, which end no line for a long time.
  void show_progress();
  // Ends lines that have no newline: the worker is gone.
  void finish();

  const LineTail& tail() const { return tail_; }

 private:
  struct Lane {
    BufferedOutput* sink;
    LineSplitter splitter;
    bool has_ended = false;
  };
  Lane& lane(Stream stream) { return stream == Stream::kOutput ? output_ : error_; }
  const Lane& lane(Stream stream) const { return stream == Stream::kOutput ? output_ : error_; }
  LineSplitter::Emit emitter(Lane& lane);

  const WorkerOutputOptions options_;
  Lane output_;
  Lane error_;
  LineTail tail_;
};

}  // namespace cadre::launch
