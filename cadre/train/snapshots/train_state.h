// All that a run needs to go on as if it had never stopped, and its form on disk.
//
// Threads: one. Blocking: for the time of the disk. Lifetime: plain values beside the model and the
// optimizer, which stay where they are. Errors: writing gives a Status, because a run survives a
// failed snapshot; reading throws kCorruption or kInvalidArgument with the file and what differs.
// Format: docs/formats/snapshot.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/checkpoint/safetensors.h"
#include "cadre/data/data_loader.h"
#include "cadre/train/config/config.h"
#include "cadre/train/tasks/task.h"

namespace torch::nn {
class Module;
}

namespace cadre::train {

inline constexpr int kFirstFormatWithDigests = 3;
// Each rank wrote its part of the model; before, rank 0 wrote whole files, as it still does where
// it has the whole model.
inline constexpr int kFirstFormatInParts = 4;

struct TrainState {
  int format = 0;    // of the snapshot that it was read from
  int64_t step = 0;  // updates done
  LoaderPosition loader;
  DataIdentity data;  // a resumed run must see the same
  // Of the best evaluation so far.
  std::optional<double> best_held_out_loss;
  std::string bucket_layout;  // empty in a world of one, and before it is learned
  // Of each rank's default generator, in rank order: (bytes) uint8.
  std::vector<at::Tensor> generators;
  std::string config;  // as TOML
};

inline constexpr std::string_view kModelFile = "model.safetensors";
inline constexpr std::string_view kOptimizerFile = "optimizer.safetensors";

// Fills an empty folder: model.safetensors, optimizer.safetensors, state.json, and B2SUMS with the
// digests of these three. optimizer_state: of whole parameters, as Optimizer::state().
Status write_train_state(const std::string& folder, const TrainState& state,
                         const torch::nn::Module& model, const NamedTensors& optimizer_state);

// The state as JSON, for a snapshot in parts.
std::string state_text(const TrainState& state);

// Of format 3 it checks all files of the snapshot first, so that the other two can be read without
// damage; of format 4 the manifest, because load_sharded() checks the other files. Of formats 1 and
// 2 only the step is checked, against the name of the folder.
TrainState read_train_state(const std::string& folder);
// The same, and in any case all files that have digests.
void check_snapshot(const std::string& folder);

}  // namespace cadre::train
