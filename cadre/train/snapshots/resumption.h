// Going on from a snapshot, whatever strategy and number of ranks wrote it.
//
// Threads: one. Blocking: for the time of the disk; restore() is collective. Lifetime: plain
// values. Errors: what does not fit is kInvalidArgument; damage is kCorruption with the file and
// the newest snapshot of the run that is whole. Those of restore() are CommonErrors, but for
// failures of the group.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cadre/base/types.h"
#include "cadre/buckets/bucket_layout.h"
#include "cadre/group/process_group.h"
#include "cadre/train/config/config.h"
#include "cadre/train/optimizer.h"
#include "cadre/train/snapshots/train_state.h"
#include "cadre/train/strategy.h"
#include "cadre/train/tasks/task.h"

namespace cadre::train {

class Resumption {
 public:
  // Reads the state and compares data and configuration with those of now. Local.
  static Resumption open(const std::string& snapshot, const Config& now, const Task& task);

  const std::string& snapshot() const { return snapshot_; }
  const TrainState& state() const { return state_; }
  // Sentences for the user: what has changed since, and what cannot be checked.
  const std::vector<std::string>& remarks() const { return remarks_; }
  std::optional<BucketLayout> bucket_layout() const;

  // The default generator of this rank, if the snapshot has one for it. Local.
  void restore_generator(Rank rank) const;
  // Fills what this rank holds of the model and of the optimizer's state.
  void restore(Strategy& strategy, Optimizer& optimizer, const ProcessGroup& world) const;

 private:
  Resumption(std::string snapshot, TrainState state, std::vector<std::string> remarks);

  NamedTensors load(const SnapshotParts& parts, const ProcessGroup& world) const;

  std::string snapshot_;
  TrainState state_;
  std::vector<std::string> remarks_;
};

}  // namespace cadre::train
