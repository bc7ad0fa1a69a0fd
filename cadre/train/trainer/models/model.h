// The base class of the trainer's models: a module that maps the data of a batch to the output from
// which the loss is computed.
//
// Threads: as torch::nn::Module. Blocking: never. Errors: c10::Error for wrong shapes.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <functional>
#include <type_traits>

#include "cadre/parallel/fsdp/shard_unit.h"
#include "cadre/tensor/hooks/activations/activation_checkpoint.h"
#include "cadre/train/trainer/config/config.h"

namespace cadre::train {

// Which rows of a batch a forward computes. Dropout that depends on the sample needs it.
struct SampledRows {
  int64_t step = 0;
  int64_t first = 0;   // the index of the first row in the global batch
  int64_t stride = 1;  // the distance between consecutive rows in the global batch
};

class Model : public torch::nn::Module {
 public:
  // Maps data of shape (B, ...) to (B, ..., classes). B may be 0.
  virtual at::Tensor forward(const at::Tensor& data) = 0;
  // Is called before each forward in training. The rows also apply to the backward of that forward.
  virtual void set_rows(const SampledRows& /*rows*/) {}
  // Returns a weighted term of shape () that must be added to the loss of the last forward()'s
  // output; undefined if there is none, and in a second call. Its autograd graph is part of the
  // output's graph.
  virtual at::Tensor take_auxiliary_loss() { return {}; }
};

// Returns `loss`, which was computed from the last forward()'s output, plus take_auxiliary_loss().
at::Tensor with_auxiliary_loss(const at::Tensor& loss, Model& model);

// Returns the output of a model for data (B, ...), without grad and in evaluation mode.
using Inference = std::function<at::Tensor(const at::Tensor& data)>;

// A linear layer that a sharding wrapper may gather separately, as a unit.
using LinearUnit = torch::nn::ModuleHolder<ShardUnit<torch::nn::LinearImpl>>;

bool recomputes_activations(const ModelConfig& config);

// Returns layer(input). If is_recomputed, only the input is kept, and backward calls the layer
// again (activation checkpointing). REQUIRES: all objects to which the layer refers live until the
// backward, and the layer changes no buffer.
template <typename Layer>
auto run_layer(const Layer& layer, const at::Tensor& input, bool is_recomputed) {
  using Output = std::invoke_result_t<const Layer&, const at::Tensor&>;
  return is_recomputed ? call_checkpointed<Output, const at::Tensor&>(layer, {}, input)
                       : layer(input);
}

enum class Activation { kRelu, kGelu };

struct HiddenLayerOptions {
  int64_t num_inputs = 0;
  int64_t num_outputs = 0;
  Activation activation = Activation::kRelu;
  bool is_recomputed = false;
};

// A linear layer and its activation function. Maps (..., num_inputs) to (..., num_outputs).
class HiddenLayer : public torch::nn::LinearImpl {
 public:
  explicit HiddenLayer(const HiddenLayerOptions& layer);
  at::Tensor forward(const at::Tensor& input);

 private:
  Activation activation_;
  bool is_recomputed_;
};

using HiddenUnit = torch::nn::ModuleHolder<ShardUnit<HiddenLayer>>;

int64_t num_parameters(const torch::nn::Module& model);

}  // namespace cadre::train
