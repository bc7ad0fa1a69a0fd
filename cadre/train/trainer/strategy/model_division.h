// A Gpt whose matrices, sequences and experts are divided among the processes of the axes tp, cp
// and ep. With experts, the loss is the mean over the tokens of all processes, and gradients are
// sums: means over the tokens of each process could not weight correctly what an expert computes
// for other processes.
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
  // parts: the parts of this process, which are not divided yet, of a model like `whole`.
  ModelDivision(const Gpt& whole, const std::vector<std::shared_ptr<Gpt>>& parts,
                const RunLayout& layout, const Config& config);

  // Returns what tp and ep leave of each parameter of the parts on this process.
  const std::vector<ParameterShard>& records() const { return records_; }

  // logits: those of this process; targets: (B, T), of whole sequences. Returns the mean over all
  // tokens.
  at::Tensor loss(const at::Tensor& logits, const at::Tensor& targets) const;
  // Returns the share of the rows of one part of a batch in the rows of the batch. They are the
  // rows of this process, or those of all processes if the loss is the mean over the tokens of all.
  // Collective with experts.
  double share_of_step(int64_t num_rows, int64_t num_samples) const;
  // tokens: (B, T), T at most the model's context. Appends zeros if the processes that divide the
  // tokens could not divide T.
  at::Tensor padded(const at::Tensor& tokens) const;
  // Gathers this process's logits to (B, num_tokens, vocabulary), without a graph.
  at::Tensor whole_logits(const at::Tensor& logits, int64_t num_tokens) const;
  // Sums gradients along cp, because the backward has computed them for the tokens of this process
  // only.
  void sum_gradients(const std::vector<at::Tensor>& parameters) const;
  // Does the same with the gradients of the ParameterShards of a strategy, and also sums along ep.
  void sum_gradients(const std::vector<ParameterShard>& records) const;

  // Returns the ParameterShards as parts of a snapshot, with the names and shapes of the plain
  // model.
  SnapshotParts snapshot_parts(const std::vector<ParameterShard>& records) const;

 private:
  DeviceMesh mesh_;
  int64_t num_tokens_;
  int64_t vocabulary_;
  bool pads_;
  std::vector<std::string> reduced_axes_;  // the axes of the strategy
  std::optional<ContextParallel> context_;
  std::optional<ExpertParallel> experts_;
  // Processes with different tokens of the loss.
  std::optional<ProcessGroup> token_group_;
  // The number of dimensions; the key is the name in the plain model.
  std::map<std::string, int64_t> num_dims_;
  std::vector<ParameterShard> records_;
};

}  // namespace cadre::train
