// Writes the snapshots of a run: where each rank has the whole model, rank 0 writes whole files;
// otherwise each rank writes its part, while training goes on.
//
// Threads: one, which is the trainer's. Blocking: the constructor, begin(), settle() and close()
// are collective; begin() returns when the parts are copied, or the whole files written. Lifetime:
// refers to the strategy; of parts a copy as large as what this rank holds is kept for the next
// snapshot. The destructor ends a save that is under way. Errors: a snapshot that fails is an
// Outcome, the same on all ranks; errors of the group are thrown.
// Format: docs/formats/snapshot.md.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cadre/base/error.h"
#include "cadre/checkpoint/snapshot_folder.h"
#include "cadre/checkpoint/snapshot_saver.h"
#include "cadre/train/optimizer.h"
#include "cadre/train/snapshots/train_state.h"
#include "cadre/train/strategy.h"

namespace cadre::train {

class SnapshotWriter {
 public:
  struct Outcome {
    int64_t step = 0;
    Status status;
  };

  // strategy_name: for people who read a manifest.
  SnapshotWriter(SnapshotFolder folder, const StrategyGroups& groups, const Strategy& strategy,
                 const std::string& strategy_name);

  // REQUIRES: settle() since the last begin().
  void begin(const TrainState& state, const Model& model, const Optimizer& optimizer);
  // Waits until the snapshot that was begun last is there or has failed; nothing when an earlier
  // call has returned its outcome.
  std::optional<Outcome> settle();
  // Leaves the group of the thread that writes. REQUIRES: settle().
  void close();

  // Whether the step's snapshot was begun, and settle() has not returned its outcome.
  bool is_under_way(int64_t step) const { return begun_ && begun_->step == step; }
  // Whether a snapshot is still being written when begin() returns.
  bool writes_in_background() const { return saver_ != nullptr; }

 private:
  Status write_whole(const TrainState& state, const Model& model, const Optimizer& optimizer);

  SnapshotFolder folder_;
  StrategyGroups groups_;
  const Strategy& strategy_;
  std::unique_ptr<SnapshotSaver> saver_;  // null: whole files
  std::optional<Outcome> begun_;
};

}  // namespace cadre::train
