// The state from which a run resumes as if it had not been interrupted, and its format on disk. The
// tensors of model and optimizer are stored separately.
//
// Threads: one. Blocking: reads and writes a disk. Lifetime: plain values. Errors: writing returns
// a Status, because a run continues after a failed snapshot; reading throws kCorruption or
// kInvalidArgument with the file and the difference. Format: docs/formats/snapshot.md.
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
// The first format in which ranks that hold shards each write their own shard. In earlier formats
// rank 0 writes whole files, which it still does if it has the whole model.
inline constexpr int kFirstFormatInParts = 4;

struct TrainState {
  int format = 0;    // the format of the snapshot
  int64_t step = 0;  // the number of completed updates
  LoaderPosition loader;
  DataIdentity data;  // a resumed run must have the same data
  // The lowest held-out loss so far; nullopt before the first evaluation.
  std::optional<double> best_held_out_loss;
  std::string bucket_layout;  // empty in a group of one rank, and before the first step
  // The states of the default random generators of the ranks, in rank order; each is a uint8 tensor
  // of shape (bytes).
  std::vector<at::Tensor> generators;
  // The type of the devices on which the run was, such as "cuda", and the states of their default
  // generators in rank order; both are empty for a run on the CPU.
  std::string device_type = {};
  std::vector<at::Tensor> device_generators = {};
  std::string config;  // the configuration as TOML
};

inline constexpr std::string_view kModelFile = "model.safetensors";
inline constexpr std::string_view kOptimizerFile = "optimizer.safetensors";

// Fills an empty folder with model.safetensors, optimizer.safetensors and state.json, and with
// B2SUMS, which has the digests of these three. `optimizer` has the states of whole parameters.
Status write_train_state(const std::string& folder, const TrainState& state,
                         const torch::nn::Module& model, std::span<const ParameterState> optimizer);
// Returns the states by their names in optimizer.safetensors, "<parameter>.<state>".
std::vector<NamedTensor> named_states(std::span<const ParameterState> states);
// The inverse of named_states(). A tensor without dimensions is one number for the whole parameter.
std::vector<ParameterState> states_by_parameter(const std::vector<NamedTensor>& named);

// Returns the state as JSON, for a sharded snapshot.
std::string state_text(const TrainState& state);

// Reads the state and checks what it can of the snapshot. Format 3: compares all files with their
// digests. Format 4: compares only the manifest, because load_sharded() checks the other files.
// Formats 1 and 2 have no digests: compares only the step with the name of the folder.
TrainState read_train_state(const std::string& folder);
// Returns the lowest held-out loss up to the snapshot. Does not check the digests of the tensors.
std::optional<double> best_loss_in(const std::string& folder);
// Checks as read_train_state() does, and all files that have digests.
void check_snapshot(const std::string& folder);

}  // namespace cadre::train
