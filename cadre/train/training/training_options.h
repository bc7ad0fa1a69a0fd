// The configuration of a Training: the strategy by which ranks divide a model, and what a step
// does.
//
// Threads: plain values. Errors: kInvalidArgument, equal on all ranks, from the Training, for an
// unknown or impossible strategy, for options out of range, and for ranks with different options.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cadre/parallel/ddp/options.h"
#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/parallel/layers/tensor_parallel_layer.h"
#include "cadre/parallel/shard/data_strategy.h"
#include "cadre/parallel/zero/options.h"

namespace cadre {

// The environment variable that names the strategy of a program that does not choose one itself.
// Its value is a list of words with commas: one of single, ddp, zero1, zero2, fsdp and hsdp, and
// degrees of ModelDegrees, such as "fsdp,tensor=2". A degree without a number, such as "tensor",
// is all ranks that the other degrees leave. Without a word of the first kind the strategy is ddp.
inline constexpr const char* kStrategyVariable = "CADRE_STRATEGY";

// The numbers of ranks among which the copies of a model are divided. Their product divides the
// number of ranks, and the strategy is between the copies: a model with the degree tensor 2 on 8
// ranks has 4 copies.
struct ModelDegrees {
  int pipeline = 1;  // ranks that have different layers
  int context = 1;   // ranks that have different tokens of the same rows
  int tensor = 1;    // ranks that have different parts of the layers that the plan names

  friend bool operator==(const ModelDegrees&, const ModelDegrees&) = default;
};

struct TrainingOptions {
  // nullopt: the strategy that CADRE_STRATEGY names, or else ddp.
  std::optional<DataStrategy> strategy = {};
  // nullopt: the degrees that CADRE_STRATEGY names if `strategy` is not set, or else 1.
  std::optional<ModelDegrees> degrees = {};
  // How the degree tensor divides layers, besides those that know it themselves, such as
  // those of a TransformerBlock (tensor_parallel_plan()). The outputs of the model must be whole,
  // so the layer that makes them is row-parallel or has gather_output.
  std::vector<PlanEntry> plan = {};
  // The name of the schedule of a pipeline (core/schedule/generate.h). num_parts is the
  // number of microbatches; with 1 only one rank computes at a time.
  std::string schedule = "1f1b";
  // How attention exchanges keys and values among ranks with different tokens.
  ContextForm context_form = ContextForm::kRing;
  // The number of groups of ranks that each have the whole model under hsdp. 0: one for each host,
  // or two if all ranks are on one host. Not used if the ranks are a mesh of two axes.
  int num_replicas = 0;
  // The number of parts into which Training::step() divides this rank's rows of a batch, one after
  // the other, to save memory (gradient accumulation), or as the microbatches of a pipeline.
  int64_t num_parts = 1;
  // step() calls this before it computes with a part of this rank's rows: [first_row, first_row +
  // num_rows). Use it for values that depend on the rows, such as DropoutStream::first_sample. In a
  // pipeline it is called for each stage of this rank, before each forward and each backward.
  std::function<void(int64_t first_row, int64_t num_rows)> before_part = {};
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

}  // namespace cadre
