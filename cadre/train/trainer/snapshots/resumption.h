// Resumes from a snapshot that was written under any strategy and by any number of ranks.
//
// Threads: one. Blocking: reads a disk; restore() is collective. Lifetime: plain values. Errors:
// kInvalidArgument for a snapshot that does not match the run, such as one of other settings;
// kUnavailable for a file that cannot be read; kCorruption for damaged bytes and missing files,
// with the file and the newest intact snapshot of the run. restore() throws them as CommonErrors,
// and failures of the group as they are.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/types.h"
#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/train/trainer/config/config.h"
#include "cadre/train/trainer/snapshots/train_state.h"
#include "cadre/train/trainer/strategy/strategy.h"
#include "cadre/train/trainer/tasks/task.h"

namespace cadre::train {

class Resumption {
 public:
  // Reads the state, and compares its data and configuration with those of this run. Local.
  static Resumption open(const std::string& snapshot, const Config& now, const Task& task);

  const std::string& snapshot() const { return snapshot_; }
  const TrainState& state() const { return state_; }
  // Returns messages for the user about changes since the snapshot, and about checks that are not
  // possible.
  const std::vector<std::string>& remarks() const { return remarks_; }
  std::optional<BucketLayout> bucket_layout() const;
  // Returns a text that identifies the snapshot's content, for comparison among the ranks. Local;
  // reads a small file.
  std::string identity() const;

  // Sets the states of this rank's default random generators, of the CPU and of the device, if the
  // snapshot has them. Adds a remark if it has none of this type of device. Local.
  void restore_generators(Rank rank, const c10::Device& device);
  // Fills this rank's tensors of the model and of the optimizer's state.
  void restore(Strategy& strategy, const ProcessGroup& world) const;

 private:
  Resumption(std::string snapshot, TrainState state, std::vector<std::string> remarks);

  std::vector<ParameterState> load(const SnapshotParts& parts, const ProcessGroup& world) const;
  void restore_generator(const std::vector<at::Tensor>& states, Rank rank,
                         const c10::Device& device) const;
  [[noreturn]] void throw_wrong_generator(const std::string& problem) const;

  std::string snapshot_;
  TrainState state_;
  std::vector<std::string> remarks_;
};

}  // namespace cadre::train
