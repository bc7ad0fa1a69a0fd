// Trains a model on text or images with any number of processes, from a configuration.
//
// In a step, each rank fetches its share of the batch. Forward and backward run in run.accumulate
// parts, and the strategy's wrapper reduces the gradients in the last part. One all_reduce of five
// numbers sums loss, samples, requests to stop, changes of the data and notices of a scheduler, so
// that all ranks have the same loss and stop after the same step. Gradients are clipped, parameters
// are updated, and the step is reported. On a device the host waits once in a step, for the norm of
// the gradients, and reads the loss with it: both must be finite before parameters are updated.
//
// Threads: one. Blocking: run() until the last step; every collective has the group's deadline.
// Lifetime: the functions of TrainerContext are called until run() returns. Errors: cadre::Error if
// the data, the snapshot and the configuration do not match, if a loss is NaN or infinite, if data
// change while they are used, if the group fails, if the last snapshot cannot be written, or if the
// processes do not have the same configuration, data, weights and snapshot, which are compared
// once, before anything is constructed. Errors other than failures of the group are CommonErrors,
// equal on all ranks. If an earlier snapshot cannot be written, or no text can be generated, the
// trainer prints a warning and continues. If run() fails while a snapshot is being written, it
// completes the snapshot before it throws.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/os/system.h"
#include "cadre/train/checkpoint/snapshot_folder.h"
#include "cadre/train/data/data_loader.h"
#include "cadre/train/trainer/config/config.h"
#include "cadre/train/trainer/evaluation.h"
#include "cadre/train/trainer/progress.h"
#include "cadre/train/trainer/run/initial_weights.h"
#include "cadre/train/trainer/run/run_folder.h"
#include "cadre/train/trainer/snapshots/resumption.h"
#include "cadre/train/trainer/snapshots/snapshot_writer.h"
#include "cadre/train/trainer/snapshots/train_state.h"
#include "cadre/train/trainer/strategy/run_layout.h"
#include "cadre/train/trainer/strategy/strategy.h"
#include "cadre/train/trainer/tasks/task.h"

namespace cadre::train {
class Model;

// The environment of a trainer. main() makes one for its process; tests make one for each thread.
struct TrainerContext {
  ProcessGroup world;
  os::System& system;
  // Returns the time spent in communication so far.
  std::function<Duration()> time_in_communication;
  // Returns whether this rank should stop; if one rank should, all ranks stop after the same step.
  std::function<bool()> stop_is_requested;
  std::function<void(std::string_view)> print;  // called on rank 0 only
  bool is_terminal = false;
  int num_columns = 80;  // the width of the terminal
  // The id of the job if its launcher may start its processes again, after a failure or because
  // hosts come or go; otherwise empty. Two jobs should not have the same one.
  std::string job = {};
  // How often it has done so. If it has, the run continues from the job's own snapshots, and
  // run.resume is ignored.
  int attempt = 0;
  // Where the model is. A device is that of `world`, and the current one of this thread.
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  // Returns whether a scheduler ends the job, as Preemption::is_requested() does; if it does so on
  // one rank, all ranks stop after the same step. Empty: never.
  std::function<bool()> is_preempted = {};
};

struct TrainResult {
  int64_t steps = 0;           // includes the steps before the run was resumed
  bool was_stopped = false;    // whether the run was stopped on request before the last step
  bool was_preempted = false;  // whether it was stopped because a scheduler ends the job
  double loss = 0;             // the loss of the last step
  Evaluation held_out;         // the evaluation at the end; empty if the run was stopped
};

class Trainer {
 public:
  Trainer(const Config& config, TrainerContext context);
  ~Trainer();

  TrainResult run();

  // Returns the number of completed steps, if this rank has the whole model and the whole state of
  // the optimizer of that step; else nullopt. Call it when run() has thrown a failure of the group.
  std::optional<int64_t> step_in_memory() const;
  // Writes that state as a snapshot of the run, unless it has one of the step. Does not
  // communicate. The snapshot has no states of random generators, because this rank has only its
  // own. Throws the error of the disk. REQUIRES: step_in_memory().
  void save_state_in_memory();

 private:
  // The sums over all ranks in one step.
  struct StepSums {
    double loss = 0;  // the mean over all samples
    bool stop = false;
    bool data_have_changed = false;
    bool is_preempted = false;
  };

  // Does all work of a rank that needs no collective; runs before the first collective.
  void prepare();
  void make_loaders();
  void load_weights();
  void open_run_folder();
  void print_header();
  void train_to_the_end();
  StepSums step(const Batch& batch);
  at::Tensor with_autocast(const std::function<at::Tensor()>& forward) const;
  at::Tensor infer(const at::Tensor& data);
  // Copies the batch to the device of the run. The host does not wait.
  Batch on_device(const Batch& batch) const;
  StepSums sum_over_ranks(double mean_loss, int64_t num_samples);
  void check_data();
  void report(double loss, double gradient_norm, TimePoint started, Duration communicated);
  std::vector<ProcessGroup> groups_of_axes() const;
  Duration time_in_communication() const;
  void evaluate();
  void begin_snapshot();
  void finish_snapshot();
  void finish_snapshot_of_failed_run() noexcept;
  void mark_best();
  TrainState state();
  void report_memory_of_device();
  void finish();
  void show_result();
  std::string sample_of_model();
  void print_line(const std::string& line);
  bool is_first_rank() const { return context_.world.rank() == 0; }
  // Returns whether the model is made without memory for its values. It is not if its layers are
  // divided or it has experts, because both need a whole model.
  bool is_deferred() const {
    return has_units(data_strategy(config_.parallel)) && !config_.parallel.divides_model() &&
           config_.model.experts == 0;
  }

  Config config_;
  TrainerContext context_;
  std::string run_path_;
  SnapshotFolder snapshots_;
  std::unique_ptr<RunFolder> run_folder_;  // null except on rank 0
  std::unique_ptr<Task> task_;
  std::optional<InitialWeights> weights_;  // set if model.weights is set
  std::optional<Resumption> resumption_;   // set by the constructor only
  std::shared_ptr<Model> model_;           // null after it was cut into stages
  int64_t num_parameters_ = 0;             // counts the whole model
  std::optional<RunLayout> layout_;
  std::unique_ptr<Strategy> strategy_;
  std::unique_ptr<SnapshotWriter> snapshot_writer_;
  std::unique_ptr<DataLoader> loader_;
  std::unique_ptr<DataLoader> held_out_loader_;
  std::unique_ptr<Progress> progress_;  // null except on rank 0
  int64_t first_step_ = 0;              // the number of steps completed before this process started
  int64_t step_ = 0;                    // the number of completed steps
  LoaderPosition loader_at_step_;       // the position in the data after step_
  int64_t saved_step_ = -1;  // the step of the last snapshot that was read or written; -1: none
  // The error of the last snapshot that could not be written.
  std::optional<Error> snapshot_failure_;
  std::optional<double> best_held_out_loss_;
  std::optional<double>
      // The best held-out loss that the last read or written snapshot records.
      saved_best_loss_;
  // The step whose snapshot will be marked as the best once it is complete; -1 if there is none.
  int64_t best_step_ = -1;
  std::optional<double> loss_before_best_;
  TimePoint run_started_;
  TrainResult result_;
};

}  // namespace cadre::train
