// A Gpt whose matrices and sequences are divided among the processes of the axes tp and cp.
//
// Threads: one. Blocking: the constructor, loss(), whole_logits() and sum_gradients() are
// collective along tp and cp. Lifetime: shares the parts and the mesh. Errors: those of
// parallelize_module() and of the groups.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/checkpoint/snapshot_parts.h"
#include "cadre/layers/attention/context_parallel.h"
#include "cadre/mesh/device_mesh.h"
#include "cadre/shard/parameter_shard.h"
#include "cadre/train/config/config.h"
#include "cadre/train/models/gpt.h"
#include "cadre/train/optimizer.h"

namespace cadre::train {

class ModelDivision {
 public:
  // parts: those of this process, not divided yet, of a model like `whole`.
  ModelDivision(const Gpt& whole, const std::vector<std::shared_ptr<Gpt>>& parts,
                const DeviceMesh& mesh, const ParallelConfig& parallel);

  // Of the parameters of the parts: what tp leaves of each on this process.
  const std::vector<ParameterShard>& records() const { return records_; }

  // logits: of this process; targets: (B, T), of whole sequences. The mean over all tokens.
  at::Tensor loss(const at::Tensor& logits, const at::Tensor& targets) const;
  // tokens: (B, T), T at most the model's context. With zeros behind them, if the processes that
  // divide the tokens could not divide T.
  at::Tensor padded(const at::Tensor& tokens) const;
  // Of this process, to (B, num_tokens, vocabulary), without history.
  at::Tensor whole_logits(const at::Tensor& logits, int64_t num_tokens) const;
  // Adds up along cp what the backward has computed for the tokens of each process.
  void sum_gradients(const std::vector<at::Tensor>& parameters) const;

  // Records as parts of a snapshot, with the names and shapes of the plain model.
  SnapshotParts snapshot_parts(const std::vector<ParameterShard>& records) const;
  std::vector<TrainedTensor> trained(const std::vector<ParameterShard>& records) const;
  // Whether weight decay applies, as in the plain model.
  bool is_decayed(const std::string& name) const { return num_dims_.at(name) >= 2; }

 private:
  DeviceMesh mesh_;
  int64_t num_tokens_;
  int64_t vocabulary_;
  bool pads_;
  std::optional<ContextParallel> context_;
  std::map<std::string, int64_t> num_dims_;  // of all parameters of the plain model
  std::vector<ParameterShard> records_;
};

}  // namespace cadre::train
