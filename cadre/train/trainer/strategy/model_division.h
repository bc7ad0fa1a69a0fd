// A Gpt whose matrices, sequences and experts are divided among the processes of the axes tp, cp
// and ep. With experts, the loss is the mean over the tokens of all processes, and gradients are
// sums: a mean over those of each process could not weight what an expert computes for the others.
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
  // parts: those of this process, not divided yet, of a model like `whole`.
  ModelDivision(const Gpt& whole, const std::vector<std::shared_ptr<Gpt>>& parts,
                const RunLayout& layout, const Config& config);

  // What tp and ep leave of each parameter of the parts on this process.
  const std::vector<ParameterShard>& records() const { return records_; }

  // logits: of this process; targets: (B, T), of whole sequences. The mean over all tokens.
  at::Tensor loss(const at::Tensor& logits, const at::Tensor& targets) const;
  // The rows of a part of a batch among those of the batch: of this process, or of all processes if
  // the loss is the mean over the tokens of all. Collective with experts.
  double share_of_step(int64_t num_rows, int64_t num_samples) const;
  // tokens: (B, T), T at most the model's context. With zeros behind them, if the processes that
  // divide the tokens could not divide T.
  at::Tensor padded(const at::Tensor& tokens) const;
  // Gathers this process's logits to (B, num_tokens, vocabulary), without history.
  at::Tensor whole_logits(const at::Tensor& logits, int64_t num_tokens) const;
  // Adds up along cp what the backward has computed for the tokens of each process.
  void sum_gradients(const std::vector<at::Tensor>& parameters) const;
  // The same of the values of the records of a strategy, and along ep.
  void sum_gradients(const std::vector<ParameterShard>& records) const;

  // Records as parts of a snapshot, with the names and shapes of the plain model.
  SnapshotParts snapshot_parts(const std::vector<ParameterShard>& records) const;

 private:
  DeviceMesh mesh_;
  int64_t num_tokens_;
  int64_t vocabulary_;
  bool pads_;
  std::vector<std::string> reduced_axes_;  // those of the strategy
  std::optional<ContextParallel> context_;
  std::optional<ExpertParallel> experts_;
  std::optional<ProcessGroup> token_group_;  // processes with different tokens of the loss
  std::map<std::string, int64_t> num_dims_;  // by parameter of the plain model
  std::vector<ParameterShard> records_;
};

}  // namespace cadre::train
