// Writes the snapshots of a run. If each rank has the whole model, rank 0 writes whole files;
// otherwise each rank writes its shard in the background.
//
// Threads: the trainer's. Blocking: the constructor, begin(), finish() and close() are collective;
// begin() returns when the shards are copied or the whole files are written. Lifetime: refers to
// the strategy; a staging copy of the size of this rank's shard is kept for the next snapshot. The
// destructor ends a save in progress. Errors: a snapshot that fails is an Outcome, equal on all
// ranks. Errors of the group are thrown. The constructor throws those of check_savable(), so that a
// run that no snapshot can hold ends before its first step. Format: docs/formats/snapshot.md.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/train/checkpoint/snapshot_folder.h"
#include "cadre/train/checkpoint/snapshot_saver.h"
#include "cadre/train/trainer/snapshots/train_state.h"
#include "cadre/train/trainer/strategy/strategy.h"

namespace cadre::train {

// The end of a run whose last step has no snapshot.
struct UnsavedEnd {
  int64_t step = 0;
  int64_t saved_step = -1;  // the step of the last snapshot; -1 if there is none
  std::string run_folder;
  Error cause;  // says why the snapshot of `step` failed
};
// Returns the error with which the run ends: the steps, and what to do about the cause.
Error unsaved_end(const UnsavedEnd& end);

class SnapshotWriter {
 public:
  struct Outcome {
    int64_t step = 0;
    Status status;
  };

  // strategy_name: written to the manifest for information only.
  SnapshotWriter(SnapshotFolder folder, const ProcessGroup& world, Strategy& strategy,
                 const std::string& strategy_name);

  // model: null if the strategy holds parts. REQUIRES: finish() was called since the last begin().
  void begin(const TrainState& state, const Model* model);
  // Waits until the snapshot that was begun last is complete or has failed. Returns nullopt if its
  // outcome was returned already.
  std::optional<Outcome> finish();
  // Closes the group of the thread that writes. REQUIRES: finish().
  void close();

  // Returns whether the step's snapshot was begun and finish() has not returned its outcome.
  bool is_under_way(int64_t step) const { return begun_ && begun_->step == step; }
  // Returns whether a snapshot is still being written when begin() returns.
  bool writes_in_background() const { return saver_ != nullptr; }

 private:
  Status write_whole(const TrainState& state, const Model& model);

  SnapshotFolder folder_;
  ProcessGroup world_;
  Strategy& strategy_;
  std::unique_ptr<SnapshotSaver> saver_;  // is null if whole files are written
  std::optional<Outcome> begun_;
};

}  // namespace cadre::train
