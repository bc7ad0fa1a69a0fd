// The module of a Training whose layers, or the tokens that it gets, are divided among ranks.
//
// Threads: one. Blocking: the constructor and every method are collective along the axes of the
// degrees, except records(). Lifetime: keeps the module and the groups. Errors: kInvalidArgument on
// all ranks of these axes for a module without layers that can be divided, with the names of those
// to replace; for tensors that have no tokens; and for outputs that differ between the ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/train/training/training_division.h"
#include "cadre/train/training/training_options.h"

namespace cadre::training_parts {

class CADRE_EXPORT DividedModel {
 public:
  // Gives the layers of a pipeline the values of rank 0, and divides layers if the degree tensor is
  // above 1.
  DividedModel(const std::shared_ptr<torch::nn::Module>& module, const TrainingDivision& division,
               const TrainingOptions& options);

  // Returns a ParameterShard for each parameter; an empty list if layers are whole.
  const std::vector<ParameterShard>& records() const { return records_; }

  // Returns true if this rank has only some tokens. Then a forward calls begin_forward(), and
  // own_tokens() for each of its arguments, (rows, tokens, ...), and whole_tokens() for each result
  // of the module. If a layer such as TransformerEmbedding takes whole sequences, own_tokens()
  // returns its argument.
  bool divides_tokens() const { return tokens_.has_value(); }
  void begin_forward() { sizes_.reset(); }
  at::Tensor own_tokens(const at::Tensor& argument);
  at::Tensor whole_tokens(const at::Tensor& result) const;

  // Returns whether check_inputs() will compare anything.
  bool compares_inputs() const { return copy_ && !has_compared_inputs_; }
  // Compares the inputs, and in a pipeline the targets, of the ranks of a copy of the model, in the
  // first forward or step.
  void check_inputs(std::span<const at::Tensor> inputs);
  // Compares the outputs of the ranks that divide the layers, in the first forward in training mode
  // and in the first in evaluation mode.
  void check_outputs(std::span<const at::Tensor> outputs);

 private:
  const ContextParallel& context_of(int64_t num_tokens);

  std::shared_ptr<torch::nn::Module> module_;
  std::optional<ProcessGroup> copy_;    // the ranks that get the same rows
  std::optional<ProcessGroup> layers_;  // the ranks that divide the layers
  std::optional<ProcessGroup> tokens_;  // the ranks that divide the tokens
  ContextForm form_;
  bool takes_whole_sequences_;  // a layer of the module takes this rank's tokens itself
  std::vector<ParameterShard> records_;
  std::map<int64_t, ContextParallel> contexts_;  // the key is the number of tokens
  const ContextParallel* context_ = nullptr;     // that of the layers
  std::optional<std::array<int64_t, 2>> sizes_;  // the rows and tokens of this forward
  bool has_compared_inputs_ = false;
  std::array<bool, 2> has_compared_outputs_ = {};  // outputs of evaluation and of training
};

}  // namespace cadre::training_parts
