// The options of FullyShardedDataParallel and of each of its units.
//
// Threads: plain values. Equal on all ranks.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/reduction/agreement/gradient_weighting.h"
#include "cadre/parallel/shard/data_strategy.h"

namespace torch::nn {
class Module;
}

namespace cadre {

// Says how long a unit keeps its full parameters after a forward with grad. Source: FSDP2's
// reshard_after_forward.
enum class Reshard : uint8_t {
  // The parameters are kept until the forward has returned; backward gathers them again (ZeRO-3).
  kAfterForward,
  // The parameters are kept until backward has passed the unit.
  kAfterBackward,
  // The parameters are kept until a backward that reduces gradients. Under no_sync() they are
  // gathered once for all backwards (ZeRO-2).
  kAfterReduction,
  // Kept until the forward has returned, except for a part that each rank keeps for its group of
  // reshard_group_size neighbouring ranks. Backward gathers within that group: less traffic between
  // groups, for the memory of the parts. Ranks 0 to k - 1 are a group, then k to 2k - 1, and so on;
  // k divides the number of ranks that own shards.
  kOntoGroup,
};
// Returns "after_forward", "after_backward", "after_reduction" or "onto_group".
CADRE_EXPORT std::string_view to_string(Reshard reshard);
// Does the reverse of to_string(); returns nullopt for another text.
CADRE_EXPORT std::optional<Reshard> parse_reshard(std::string_view text);

// Puts this rank's shards, their gradients and, with Cadre's optimizers, the optimizer's state into
// a file on disk, of which the kernel keeps as much in memory as there is room for. So a model may
// be larger than memory; the parameters of the units that compute must fit. The file has no name:
// it disappears when the process ends, even if it is killed.
struct FileOffload {
  std::string folder;  // the folder of this rank, on a disk; a tmpfs would be memory
  // The number of tensors of optimizer state per parameter for which disk space is reserved at the
  // start: 2 for AdamW. The optimizer's first step reserves more if it needs more.
  int num_states = 2;
};

// Owners keep their shards in the dtype that the parameters had before.
struct ShardPrecision {
  // The dtype of gathered parameters, in which the unit computes.
  std::optional<c10::ScalarType> parameters = {};
  std::optional<c10::ScalarType> reduce = {};  // the dtype of gradients while they are reduced
  // The dtype of what forward() returns. In the wrapper's precision it applies to the root alone.
  std::optional<c10::ScalarType> outputs = {};
  // Floating-point arguments of forward() are cast to the dtype `parameters`, if that is set.
  bool cast_inputs = true;
};

struct FullyShardOptions {
  std::optional<Reshard> reshard = {};  // the default is that of the wrapper
  // Only kOntoGroup uses it; the default is that of the wrapper.
  std::optional<int> reshard_group_size = {};
  std::optional<ShardPrecision> precision = {};
};

// A ShardUnit for which fully_shard() was not called.
struct WrapCandidate {
  std::string name;  // "blocks.3"
  const torch::nn::Module& module;
  int64_t numel;  // the number of elements of its parameters, without those of units inside it
};
// Returns whether the candidate becomes a unit. Called for children before their parents.
using WrapPolicy = std::function<bool(const WrapCandidate& candidate)>;

struct FullyShardedDataParallelOptions {
  // With kMapped, the ranks of one host that own shards of the same parameters read them in place.
  // It needs a ShardedOptimizer, because other optimizers do not synchronize their writes.
  ShardForm form = ShardForm::kGathered;
  Reshard reshard = Reshard::kAfterForward;        // says how long units keep full parameters
  Reshard reshard_root = Reshard::kAfterBackward;  // says the same for parameters outside of units
  std::optional<int> reshard_group_size = {};      // only kOntoGroup uses it
  // The number of units whose gather runs while another unit computes: 0 or 1.
  int num_prefetched = 1;
  ShardPrecision precision = {};
  std::optional<FileOffload> offload = {};  // is given on all ranks or on none
  WrapPolicy wrap_policy = {};              // wrap_policy.h has policies
  // Names of parameters, or of modules with all of their submodules, that stay whole on every rank,
  // neither sharded nor reduced.
  std::vector<std::string> ignored = {};
  GradientWeighting weighting = GradientWeighting::kSamples;
  // Every rank gets rank 0's buffers before each synchronized forward in training mode.
  bool broadcast_buffers = true;
};

}  // namespace cadre
