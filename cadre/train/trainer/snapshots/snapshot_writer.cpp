#include "cadre/train/trainer/snapshots/snapshot_writer.h"

#include <ATen/ops/full.h>

#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/train/checkpoint/optimizer_state.h"
#include "cadre/train/checkpoint/sharded_save.h"
#include "cadre/train/trainer/models/model.h"

namespace cadre::train {
SnapshotWriter::SnapshotWriter(SnapshotFolder folder, const ProcessGroup& world, Strategy& strategy,
                               const SaveOptions& options)
    : folder_(std::move(folder)), world_(world), strategy_(strategy) {
  if (!strategy.holds_parts()) return;
  check_savable(strategy.parts(), world_);
  saver_ = std::make_unique<SnapshotSaver>(folder_, world_, options);
}

void SnapshotWriter::begin(const TrainState& state, const Model* model) {
  if (!saver_) {
    begun_ = {state.step, write_whole(state, *model)};
    return;
  }
  SnapshotParts parts = strategy_.parts();
  parts.optimizer = state_dict(strategy_.local_optimizer(), parts.parameters, {.is_shared = true});
  parts.extra = state_text(state);
  // save() cannot throw an error of the previous save, because finish() has returned it already.
  saver_->save(state.step, parts);
  begun_ = {state.step, Status()};
}

std::optional<SnapshotWriter::Outcome> SnapshotWriter::finish() {
  std::optional<Outcome> outcome = std::exchange(begun_, std::nullopt);
  try {
    if (outcome && saver_) saver_->finish();
  } catch (const Error& error) {
    outcome->status = error;
  }
  return outcome;
}

Error unsaved_end(const UnsavedEnd& end) {
  std::string text = cadre::format("the run ended at step {}, ", end.step);
  text += end.saved_step < 0
              ? "but no snapshot could be written, so its result is lost: "
              : cadre::format("whose snapshot could not be written; the last one is of step {}: ",
                              end.saved_step);
  // The cause is not the disk, so another attempt would fail in the same way.
  if (end.cause.code() == ErrorCode::kInvalidArgument) {
    return Error(ErrorCode::kInternal, cadre::format("{}{}; report this with the configuration",
                                                     text, end.cause.message()));
  }
  text += cadre::format("free disk space in {}", end.run_folder);
  text += end.saved_step < 0 ? ", or choose another run.folder, and start it again"
                             : " and resume with run.resume=auto";
  return Error(ErrorCode::kUnavailable, text);
}

void SnapshotWriter::close() {
  if (saver_) saver_->close();
}

// Writes the whole files on rank 0. Returns on all ranks whether that succeeded; only rank 0's
// Status has the reason of a failure.
Status SnapshotWriter::write_whole(const TrainState& state, const Model& model) {
  Status status;
  try {
    if (world_.rank() == 0) {
      folder_.save(state.step, [&](const std::string& folder) {
        const std::vector<ParameterState> states = state_dict(
            strategy_.local_optimizer(), strategy_.parts().parameters, {.is_shared = true});
        write_train_state(folder, state, model, states).value_or_throw();
      });
    }
  } catch (const Error& error) {
    status = error;
  }
  const at::Tensor is_saved = at::full({1}, status.ok() ? 1.0 : 0.0, at::kDouble);
  world_.all_reduce(is_saved, {.op = ReduceOp::kMin});
  if (!status.ok() || is_saved.item<double>() != 0) return status;
  return Error(ErrorCode::kUnavailable, "rank 0 could not write the snapshot");
}

}  // namespace cadre::train
