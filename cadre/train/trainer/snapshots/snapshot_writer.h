// Writes the snapshots of a run. If each rank has the whole model, rank 0 writes whole files;
// otherwise each rank writes its shard in the background.
//
// Threads: the trainer's. Blocking: the constructor, begin(), finish() and close() are collective;
// begin() returns when the shards are copied or the whole files are written. Lifetime: refers to
// the strategy; a staging copy of the size of this rank's shard is kept for the next snapshot. The
// destructor ends a save in progress. Errors: a failed snapshot is returned as an Outcome, equal on
// all ranks; errors of the group are thrown. The constructor throws the errors of check_savable(),
// so that a run whose parameters cannot be saved ends before its first step. Format:
// docs/formats/snapshot.md.
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

// Describes a run whose last step could not be saved.
struct UnsavedEnd {
  int64_t step = 0;
  int64_t saved_step = -1;  // the step of the last snapshot; -1 if there is none
  std::string run_folder;
  Error cause;  // why the snapshot of `step` failed
};
// Returns the error with which the run ends. It says which steps are saved and what to do.
Error unsaved_end(const UnsavedEnd& end);

class SnapshotWriter {
 public:
  struct Outcome {
    int64_t step = 0;
    Status status;
  };

  SnapshotWriter(SnapshotFolder folder, const ProcessGroup& world, Strategy& strategy,
                 const SaveOptions& options);

  // `model` is null if the ranks hold shards or parts. REQUIRES: finish() was called since the last
  // begin().
  void begin(const TrainState& state, const Model* model);
  // Waits until the last snapshot is complete or has failed, and returns its outcome. Returns
  // nullopt if that outcome was returned before.
  std::optional<Outcome> finish();
  // Closes the group of the background thread. REQUIRES: finish().
  void close();

  // Returns whether begin() was called for this step and finish() has not yet returned the outcome.
  bool is_under_way(int64_t step) const { return begun_ && begun_->step == step; }
  // Returns whether begin() returns before the snapshot is complete.
  bool writes_in_background() const { return saver_ != nullptr; }

 private:
  Status write_whole(const TrainState& state, const Model& model);

  SnapshotFolder folder_;
  ProcessGroup world_;
  Strategy& strategy_;
  std::unique_ptr<SnapshotSaver> saver_;  // null if rank 0 writes whole files
  std::optional<Outcome> begun_;
};

}  // namespace cadre::train
