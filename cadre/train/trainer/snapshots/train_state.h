// The state from which a run resumes as if it had not stopped, and its format on disk.
//
// Threads: one. Blocking: reads and writes a disk. Lifetime: plain values; the tensors of model and
// optimizer are not in it. Errors: writing returns a Status, because a run continues after a failed
// snapshot; reading throws kCorruption or kInvalidArgument with the file and the difference.
// Format: docs/formats/snapshot.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/train/checkpoint/module_file.h"
#include "cadre/train/checkpoint/snapshot_parts.h"
#include "cadre/train/data/data_loader.h"
#include "cadre/train/trainer/config/config.h"
#include "cadre/train/trainer/tasks/task.h"

namespace torch::nn {
class Module;
}

namespace cadre::train {

inline constexpr int kFirstFormatWithDigests = 3;
// From this format on, each rank writes its shard of the model. In earlier formats rank 0 writes
// whole files; it still does if it has the whole model.
inline constexpr int kFirstFormatInParts = 4;

struct TrainState {
  int format = 0;    // the format of the snapshot
  int64_t step = 0;  // the number of updates done
  LoaderPosition loader;
  DataIdentity data;  // must be equal in a resumed run
  // The lowest held-out loss so far; nullopt before the first evaluation.
  std::optional<double> best_held_out_loss;
  std::string bucket_layout;  // is empty in a group of one, and before the first step
  // The states of the ranks' default generators, in rank order: (bytes) uint8.
  std::vector<at::Tensor> generators;
  std::string config;  // the configuration as TOML
};

inline constexpr std::string_view kModelFile = "model.safetensors";
inline constexpr std::string_view kOptimizerFile = "optimizer.safetensors";

// Fills an empty folder with model.safetensors, optimizer.safetensors, state.json, and B2SUMS,
// which has the digests of these three. optimizer: the states of whole parameters.
Status write_train_state(const std::string& folder, const TrainState& state,
                         const torch::nn::Module& model, std::span<const ParameterState> optimizer);
// Returns the states under their names in optimizer.safetensors, "<parameter>.<state>".
std::vector<NamedTensor> named_states(std::span<const ParameterState> states);
// Does the reverse. A tensor without dimensions is one value for the whole parameter.
std::vector<ParameterState> states_by_parameter(const std::vector<NamedTensor>& named);

// Returns the state as JSON, for a sharded snapshot.
std::string state_text(const TrainState& state);

// Reads the state. For format 3 it first checks the digests of all files of the snapshot; for
// format 4 only that of the manifest, because load_sharded() checks the other files. For formats 1
// and 2 it only compares the step with the name of the folder.
TrainState read_train_state(const std::string& folder);
// Returns the lowest held-out loss until the snapshot. Does not check the digests of tensors.
std::optional<double> best_loss_in(const std::string& folder);
// Does the same as read_train_state(), and checks all files that have digests.
void check_snapshot(const std::string& folder);

}  // namespace cadre::train
