// Reports the progress of a run: one line per step for people, and one JSON line per step for
// programs.
//
// Threads: one. Blocking: writes one line. Lifetime: the file is open while the object lives.
// Errors: kUnavailable when the metrics file cannot be opened or, for a resumed run, rewritten; a
// metrics line that cannot be written later is skipped, with one warning for each series of skipped
// lines, because a full disk must not stop a training run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "cadre/core/base/deadline.h"
#include "cadre/core/os/files/locked_file.h"
#include "cadre/train/trainer/evaluation.h"
#include "cadre/train/trainer/loss_curve.h"

namespace cadre::train {

struct StepReport {
  int64_t step = 0;
  int64_t num_steps = 0;
  double loss = 0;  // the mean over the samples of all ranks, before the update
  double learning_rate = 0;
  double gradient_norm = 0;               // the norm before clipping
  double items_per_second = 0;            // counts the items of all ranks together
  std::string_view item_name = "tokens";  // the unit of the speed
  double communication_share = 0;         // the share of this rank's time, at most 1
  int64_t memory_bytes = 0;               // the resident memory of this process
  double seconds_left = 0;
};

// Returns the share of a step's time, 0 to 1. communicated: the sum of the times of all operations.
// It may exceed the step, because operations of several groups may run at once.
double communication_share(Duration communicated, Duration step);

struct EvaluationReport {
  int64_t step = 0;
  Evaluation held_out;
};

struct ProgressOptions {
  std::function<void(std::string_view)> print;  // writes to standard output, unchanged
  bool is_terminal = false;                     // one line is rewritten in place
  int num_columns = 72;                         // the width of a plot on a terminal
  std::string metrics_path;
  // A resumed run removes the metrics that an earlier run wrote for later steps.
  int64_t keep_metrics_until_step = 0;
};

class Progress {
 public:
  explicit Progress(const ProgressOptions& options);

  void report(const StepReport& step);
  void report(const EvaluationReport& evaluation);
  // Prints a line that is not rewritten.
  void print_line(std::string_view line);
  // Prints the losses of the whole run, including those before it was resumed: on a terminal as a
  // plot, else as one line. Writes a picture of them to `svg_path` and prints that path, or a
  // warning if the picture cannot be written. Does nothing for fewer than two steps.
  void plot(const std::string& title, const std::string& svg_path);

 private:
  os::LockedFile open_metrics();
  void write_metrics(const std::string& json_line);

  ProgressOptions options_;
  LossCurve curve_;
  os::LockedFile metrics_;
  size_t metrics_size_;
  bool line_is_open_ = false;  // the last line is that of a step, which the next step may rewrite
  bool is_losing_lines_ = false;  // the last line could not be written
};

// Returns "step   12/1000  loss 2.4131  35.1k tokens/s  comm  4 %  312 MB  1:23 left".
std::string step_line(const StepReport& step);

// Returns the resident memory of this process.
int64_t resident_memory_bytes();

}  // namespace cadre::train
