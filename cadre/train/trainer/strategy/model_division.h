// A Gpt whose matrices, sequences and experts are divided among the processes of the mesh axes tp,
// cp and ep. With experts, the loss is the mean over the tokens of all processes, and gradients are
// summed over the processes. Means over the tokens of each process could not give the right weight
// to the tokens that an expert computes for other processes.
//
// Threads: one. Blocking: the constructor, loss(), whole_logits() and sum_gradients() are
// collective along tp, cp and ep, and with experts also along the axes of the strategy. Lifetime:
// shares the parts and the mesh. Errors: those of parallelize_module(), of ExpertParallel and of
// the groups.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/parallel/ep/expert_parallel.h"
#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/train/checkpoint/snapshot_parts.h"
#include "cadre/train/trainer/config/config.h"
#include "cadre/train/trainer/models/gpt.h"
#include "cadre/train/trainer/strategy/run_layout.h"

namespace cadre::train {

class ModelDivision {
 public:
  // `parts` are this process's parts, not divided yet, of a model like `whole`.
  ModelDivision(const Gpt& whole, const std::vector<std::shared_ptr<Gpt>>& parts,
                const RunLayout& layout, const Config& config);

  // Returns, for each parameter of the parts, the shard that tensor and expert parallelism leave on
  // this process.
  const std::vector<ParameterShard>& records() const { return records_; }

  // `logits` are those of this process; `targets` (B, T) are whole sequences. Returns the mean loss
  // over all tokens.
  at::Tensor loss(const at::Tensor& logits, const at::Tensor& targets) const;
  // Returns the fraction of a batch's rows that is in one of the parts over which gradients are
  // accumulated. Counts this process's rows; with experts, where the loss is the mean over all
  // tokens, counts those of all processes and is collective.
  double share_of_step(int64_t num_rows, int64_t num_samples) const;
  // Appends zeros to tokens (B, T), T at most the model's context, if T is not a multiple of the
  // number of processes that divide the tokens.
  at::Tensor padded(const at::Tensor& tokens) const;
  // Gathers this process's logits to (B, num_tokens, vocabulary), without a graph.
  at::Tensor whole_logits(const at::Tensor& logits, int64_t num_tokens) const;
  // Sums gradients along cp: the backward of each process covers only its own tokens.
  void sum_gradients(const std::vector<at::Tensor>& parameters) const;
  // Sums the gradients of a strategy's ParameterShards along cp and ep.
  void sum_gradients(const std::vector<ParameterShard>& records) const;

  // Returns the ParameterShards as parts of a snapshot, with the names and shapes that the plain
  // model has.
  SnapshotParts snapshot_parts(const std::vector<ParameterShard>& records) const;

 private:
  DeviceMesh mesh_;
  int64_t num_tokens_;
  int64_t vocabulary_;
  bool pads_;
  std::vector<std::string> reduced_axes_;  // the mesh axes of the strategy
  std::optional<ContextParallel> context_;
  std::optional<ExpertParallel> experts_;
  // The group of the processes whose losses are over different tokens.
  std::optional<ProcessGroup> token_group_;
  // Maps each name in the plain model to its number of dimensions.
  std::map<std::string, int64_t> num_dims_;
  std::vector<ParameterShard> records_;
};

}  // namespace cadre::train
