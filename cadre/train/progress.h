// What a run tells while it goes: one line a step for people, one JSON line a step for programs.
//
// Threads: one. Blocking: writes one line. Lifetime: the file is open while the object lives.
// Errors: kUnavailable when the metrics file cannot be opened or, for a resumed run, rewritten; a
// line that cannot be written later is left out whole, and said once for each such time: a full
// disk must not stop a training run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "cadre/os/files/locked_file.h"
#include "cadre/train/evaluation.h"

namespace cadre::train {

struct StepReport {
  int64_t step = 0;
  int64_t num_steps = 0;
  double loss = 0;  // mean over the samples of all ranks, before the update
  double learning_rate = 0;
  double gradient_norm = 0;               // before clipping
  double items_per_second = 0;            // of all ranks
  std::string_view item_name = "tokens";  // what they are
  double communication_share = 0;         // of this rank's time
  int64_t memory_bytes = 0;               // resident, of this process
  double seconds_left = 0;
};

struct EvaluationReport {
  int64_t step = 0;
  Evaluation held_out;
};

struct ProgressOptions {
  std::function<void(std::string_view)> print;  // to the user's screen, as it is
  bool is_terminal = false;                     // rewrite one line in place
  std::string metrics_path;
  // A resumed run replaces what an earlier one told of later steps.
  int64_t keep_metrics_until_step = 0;
};

class Progress {
 public:
  explicit Progress(const ProgressOptions& options);

  void report(const StepReport& step);
  void report(const EvaluationReport& evaluation);
  // A whole line of its own, which stays.
  void say(std::string_view line);

 private:
  void write_metrics(const std::string& json_line);

  ProgressOptions options_;
  os::LockedFile metrics_;
  size_t metrics_size_;
  bool line_is_open_ = false;     // a step's line that the next may overwrite
  bool is_losing_lines_ = false;  // the last could not be written
};

// "step   12/1000  loss 2.4131  35.1k tokens/s  comm  4 %  312 MB  1:23 left"
std::string step_line(const StepReport& step);

// Of this process.
int64_t resident_memory_bytes();

}  // namespace cadre::train
