// What may be chosen about FullyShardedDataParallel and about each of its units.
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
#include "cadre/parallel/shard/data_strategy.h"
#include "cadre/tensor/hooks/sample_weight.h"

namespace torch::nn {
class Module;
}

namespace cadre {

// Until when a unit keeps its full parameters after a forward with grad. Source: FSDP2's
// reshard_after_forward.
enum class Reshard : uint8_t {
  // Until the forward has returned; backward gathers them again (ZeRO-3).
  kAfterForward,
  // Until backward has passed the unit.
  kAfterBackward,
  // Until a backward that reduces gradients: under no_sync() they are gathered once for all
  // backwards (ZeRO-2).
  kAfterReduction,
  // Until the forward has returned, but each rank keeps a part of them for its group of
  // reshard_group_size neighbouring ranks, and backward gathers within that group: less traffic
  // between groups, for the memory of the parts. Ranks 0 to k - 1 are a group, then k to 2k - 1,
  // and so on; k divides the number of ranks that own shards.
  kOntoGroup,
};
// "after_forward", "after_backward", "after_reduction", "onto_group".
CADRE_EXPORT std::string_view to_string(Reshard reshard);
// The reverse; nullopt for another text.
CADRE_EXPORT std::optional<Reshard> parse_reshard(std::string_view text);

// This rank's shards, their gradients and, with Cadre's optimizers, the optimizer's state lie in a
// file on disk, of which the kernel keeps as much in memory as there is room for. So a model may be
// larger than memory; the parameters of the units that compute must fit. The file has no name:
// nothing is left of it when the process ends, however it ends.
struct FileOffload {
  std::string folder;  // this rank's folder, on a disk; a tmpfs would be memory
  // Tensors of optimizer state per parameter for which disk space is reserved at the start: 2 for
  // AdamW. The optimizer's first step reserves more if it needs more.
  int num_states = 2;
};

// Parameters are kept by their owners in the dtype that they had before.
struct ShardPrecision {
  std::optional<c10::ScalarType> parameters = {};  // dtype of gathered parameters and compute
  std::optional<c10::ScalarType> reduce = {};      // dtype of gradients while they are reduced
  // Dtype of what forward() returns; in the wrapper's precision, that of the root alone.
  std::optional<c10::ScalarType> outputs = {};
  // Floating-point arguments of forward() take the dtype of the parameters, where that is set.
  bool cast_inputs = true;
};

struct FullyShardOptions {
  std::optional<Reshard> reshard = {};         // otherwise that of the wrapper
  std::optional<int> reshard_group_size = {};  // for kOntoGroup; otherwise that of the wrapper
  std::optional<ShardPrecision> precision = {};
};

// A ShardUnit that fully_shard() was not called for.
struct WrapCandidate {
  std::string name;  // "blocks.3"
  const torch::nn::Module& module;
  int64_t numel;  // elements of its parameters, without those of units below it
};
// Whether it becomes a unit. Asked children first.
using WrapPolicy = std::function<bool(const WrapCandidate& candidate)>;

struct FullyShardedDataParallelOptions {
  // kMapped: the ranks of one host that own shards of the same parameters read them in place. The
  // optimizer is a ShardedOptimizer, because no other one knows when it may write.
  ShardForm form = ShardForm::kGathered;
  Reshard reshard = Reshard::kAfterForward;        // for the units
  Reshard reshard_root = Reshard::kAfterBackward;  // for the parameters outside of units
  std::optional<int> reshard_group_size = {};      // for kOntoGroup
  // Units whose gather is under way while another one computes: 0 or 1.
  int num_prefetched = 1;
  ShardPrecision precision = {};
  std::optional<FileOffload> offload = {};  // on all ranks or on none
  WrapPolicy wrap_policy = {};              // see wrap_policy.h
  // Names of parameters, or of modules with all that is below them, that stay as they are: whole on
  // every rank, neither sharded nor reduced.
  std::vector<std::string> ignored = {};
  GradientWeighting weighting = GradientWeighting::kSamples;
  // Rank 0's buffers everywhere before each synchronized forward in training mode.
  bool broadcast_buffers = true;
};

}  // namespace cadre
