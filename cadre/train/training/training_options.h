// The configuration of a Training: the strategy by which ranks divide a model, and what a step
// does.
//
// Threads: plain values. Blocking: a TrainingDivision is made collectively. Errors:
// kInvalidArgument, equal on all ranks, for an unknown or impossible strategy, for options out of
// range, and for ranks with different options.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/ddp/options.h"
#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/shard/data_strategy.h"
#include "cadre/parallel/zero/options.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/mesh/ranks.h"

namespace cadre {

// The environment variable that names the strategy of a program that does not choose one itself:
// single, ddp, zero1, zero2, fsdp or hsdp.
inline constexpr const char* kStrategyVariable = "CADRE_STRATEGY";

struct TrainingOptions {
  // nullopt: the strategy that CADRE_STRATEGY names, or else ddp.
  std::optional<DataStrategy> strategy = {};
  // The number of groups of ranks that each have the whole model under hsdp. 0: one for each host,
  // or two if all ranks are on one host. Not used if the ranks are a mesh of two axes.
  int num_replicas = 0;
  // The number of parts into which Training::step() divides this rank's rows of a batch, one after
  // the other, to save memory (gradient accumulation).
  int64_t num_parts = 1;
  // step() scales the gradients such that their norm over all ranks is at most this.
  std::optional<double> max_norm = {};
  // The dtype of the autocast under which forward() runs, such as torch::kBFloat16; its results are
  // converted to float32. nullopt: no autocast.
  std::optional<c10::ScalarType> autocast = {};
  // How the gradients of the ranks are weighted.
  GradientWeighting weighting = GradientWeighting::kSamples;
  // The options of the wrappers. Training sets ddp.gradients and the weighting of both. With
  // zero.wait_in_step unset, step() waits until this rank has the updated parameters. If
  // fsdp.wrap_policy is not set, the layers of the model (wrap_layers()) and its ShardUnits are the
  // units.
  DistributedDataParallelOptions ddp = {};
  ZeroOptions zero = {};
  FullyShardedDataParallelOptions fsdp = {};
};

// The ranks and the strategy of a Training. All ranks have agreed on the options.
class CADRE_EXPORT TrainingDivision {
 public:
  TrainingDivision(const Ranks& ranks, const TrainingOptions& options);

  DataStrategy strategy() const { return strategy_; }
  // Returns all ranks: a group, or under hsdp a mesh of two axes.
  const Ranks& ranks() const { return ranks_; }
  // Returns the groups along the axes of that mesh; an empty list if there is none.
  std::vector<ProcessGroup> groups_of_axes() const;

 private:
  DataStrategy strategy_;
  Ranks ranks_;
};

}  // namespace cadre
