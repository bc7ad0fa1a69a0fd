// The options of FullyShardedDataParallel and of each of its units.
//
// All ranks must pass the same options.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
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
  // The unit's parameters are freed after its forward, and gathered again for its backward
  // (ZeRO-3).
  kAfterForward,
  // The parameters are freed when the backward has computed the unit's gradients.
  kAfterBackward,
  // The parameters are freed at the end of a backward that reduces gradients. So while gradients
  // are accumulated under no_sync(), the parameters are gathered only once (ZeRO-2).
  kAfterReduction,
  // The parameters are divided, after the unit's forward, among a group of k = reshard_group_size
  // neighbouring ranks: each rank keeps 1/k of them and frees the rest. The backward gathers only
  // within that group, which saves traffic between hosts but needs memory. The groups are ranks 0
  // to k - 1, then k to 2k - 1, and so on; k must divide the number of ranks that own shards.
  kOntoGroup,
};
// Returns "after_forward", "after_backward", "after_reduction" or "onto_group".
CADRE_EXPORT std::string_view to_string(Reshard reshard);
// Does the reverse of to_string(); returns nullopt for another text.
CADRE_EXPORT std::optional<Reshard> parse_reshard(std::string_view text);

// Puts this rank's shards, their gradients and, with Cadre's optimizers, the optimizer state into a
// mapped file on disk. The kernel caches the file in free memory. So a model may be larger than the
// memory, as long as the gathered parameters of one or two units fit. The file has no name, so the
// kernel deletes it when the process ends, even after kill -9.
struct FileOffload {
  // The folder for this rank's file; it must be on a disk, because a tmpfs is memory.
  std::string folder;
  // The number of optimizer-state tensors for each parameter: 2 for AdamW. Disk space for them is
  // reserved in the constructor. If the optimizer has more, its first step reserves more.
  int num_states = 2;
};

// Mixed precision. The shards always keep the original dtype of the parameters.
struct ShardPrecision {
  // The dtype of gathered parameters, in which the unit computes; default: the original dtype.
  std::optional<c10::ScalarType> parameters = {};
  std::optional<c10::ScalarType> reduce = {};  // the dtype in which gradients are reduced
  // The dtype to which the results of forward() are cast. If set in the wrapper's options, it
  // applies only to the results of the root module.
  std::optional<c10::ScalarType> outputs = {};
  // Whether floating-point arguments of forward() are cast to the dtype `parameters`, if that is
  // set.
  bool cast_inputs = true;
};

struct FullyShardOptions {
  std::optional<Reshard> reshard = {};  // default: the wrapper's reshard
  // The number of ranks of a group for Reshard::kOntoGroup; the default is the wrapper's option.
  std::optional<int> reshard_group_size = {};
  std::optional<ShardPrecision> precision = {};
};

// A module of the model that a WrapPolicy may make a unit, for which fully_shard() was not called.
struct WrapCandidate {
  std::string name;  // "blocks.3"
  const torch::nn::Module& module;
  // The modules around it: the model, then one inside of the other, and last the one that has
  // registered the candidate.
  std::span<const torch::nn::Module* const> around;
  int64_t numel;  // elements of its parameters, without those of units inside of it
  bool is_shard_unit;
};

// The answer of a WrapPolicy: whether the candidate becomes a unit, and the options of that unit.
class WrapChoice {
 public:
  // Both constructors convert, so that a policy can return a bool or options.
  WrapChoice(bool is_unit) {  // NOLINT(google-explicit-constructor)
    if (is_unit) options_.emplace();
  }
  WrapChoice(FullyShardOptions options)
      : options_(options) {}  // NOLINT(google-explicit-constructor)

  // Returns the options of the unit; nullopt if the candidate becomes none.
  const std::optional<FullyShardOptions>& options() const { return options_; }

 private:
  std::optional<FullyShardOptions> options_;
};

// It is called for children before their parents. It must give the same answers on all ranks.
using WrapPolicy = std::function<WrapChoice(const WrapCandidate& candidate)>;

struct FullyShardedDataParallelOptions {
  // If this is kMapped, ranks on one host read each other's shards in place. kMapped needs a
  // ShardedOptimizer, because other optimizers do not wait until no rank reads the shards.
  ShardForm form = ShardForm::kGathered;
  Reshard reshard = Reshard::kAfterForward;        // the default of all units
  Reshard reshard_root = Reshard::kAfterBackward;  // applies to parameters outside of units
  // The number of ranks of a group for Reshard::kOntoGroup.
  std::optional<int> reshard_group_size = {};
  // How many units are prefetched, so that their gather overlaps with the computation of another
  // unit: 0 or 1.
  int num_prefetched = 1;
  ShardPrecision precision = {};
  // The device of the parameters and buffers: the CPU or this rank's device in the group. Those
  // that are elsewhere, or deferred, are moved there, one unit after the other, before they are
  // sharded. If nullopt, all stay where they are, and deferred ones are made on the CPU.
  std::optional<c10::Device> device = {};
  // Set on all ranks or on none, and only for parameters on the CPU.
  std::optional<FileOffload> offload = {};
  WrapPolicy wrap_policy = {};  // see wrap_policy.h
  // Names of parameters that are neither sharded nor reduced, but stay whole on every rank. The
  // name of a module stands for all parameters in it.
  std::vector<std::string> ignored = {};
  GradientWeighting weighting = GradientWeighting::kSamples;
  // Whether rank 0's buffers are broadcast before each synchronized forward in training mode.
  bool broadcast_buffers = true;
};

}  // namespace cadre
