// Reports the progress of a run: each step as a line of text on the screen and as a JSON line in
// the metrics file.
//
// Threads: one. Blocking: writes one line. Lifetime: the metrics file is open while the object
// lives. Errors: kUnavailable if the metrics file cannot be opened or, in a resumed run, rewritten.
// A metrics line that cannot be written later is skipped, because a full disk must not stop a
// training run; a warning is printed for each series of skipped lines.
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
  double items_per_second = 0;            // summed over all ranks
  std::string_view item_name = "tokens";  // the unit of the speed
  // The fraction of this rank's time that is spent in communication, at most 1.
  double communication_share = 0;
  int64_t memory_bytes = 0;  // the resident memory of this process
  double seconds_left = 0;
};

// Returns the fraction of a step's time that is spent in communication, from 0 to 1. `communicated`
// is the sum of the times of all operations; it may exceed the step, because operations of several
// groups may overlap.
double communication_share(Duration communicated, Duration step);

struct EvaluationReport {
  int64_t step = 0;
  Evaluation held_out;
};

struct ProgressOptions {
  std::function<void(std::string_view)> print;  // writes the text to standard output, unchanged
  bool is_terminal = false;  // whether each step's line overwrites the previous one
  int num_columns = 72;      // the width of the plot of the losses
  std::string metrics_path;
  // A resumed run removes the metrics of later steps than this from the file.
  int64_t keep_metrics_until_step = 0;
};

class Progress {
 public:
  explicit Progress(const ProgressOptions& options);

  void report(const StepReport& step);
  void report(const EvaluationReport& evaluation);
  // Prints a line that later lines do not overwrite.
  void print_line(std::string_view line);
  // Prints the losses of the whole run, including those before it was resumed: on a terminal as a
  // plot, otherwise as one line. Writes an SVG picture of them to `svg_path` and prints that path,
  // or a warning if the picture cannot be written. Does nothing if there are fewer than two steps.
  void plot(const std::string& title, const std::string& svg_path);

 private:
  os::LockedFile open_metrics();
  void write_metrics(const std::string& json_line);

  ProgressOptions options_;
  LossCurve curve_;
  os::LockedFile metrics_;
  size_t metrics_size_;
  // The last line on the screen is that of a step, which the next step may overwrite.
  bool line_is_open_ = false;
  bool is_losing_lines_ = false;  // the last metrics line could not be written
};

// Returns the line of a step, such as "step   12/1000  loss 2.4131  35.1k tokens/s  comm  4 %  312
// MB  1:23 left".
std::string step_line(const StepReport& step);

// Returns the resident memory of this process in bytes.
int64_t resident_memory_bytes();

}  // namespace cadre::train
