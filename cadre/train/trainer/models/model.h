// The base class of the trainer's models: a module that maps a batch's data to the input of the
// loss.
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

// The rows of a run's batches that a forward is given, for dropout that depends on the sample.
struct SampledRows {
  int64_t step = 0;
  int64_t first = 0;   // the index of the first row in the batch of all processes
  int64_t stride = 1;  // the distance from one row to the next
};

class Model : public torch::nn::Module {
 public:
  // data: (B, ...); returns (B, ..., classes). B may be 0.
  virtual at::Tensor forward(const at::Tensor& data) = 0;
  // Called before each forward in training. The rows also apply to the backward of that forward.
  virtual void set_rows(const SampledRows& /*rows*/) {}
  // Returns a term (), with its weight, that is to be added to the loss of the last forward()'s
  // output; undefined if there is none. A second call returns an undefined tensor. Its graph is a
  // part of the output's graph.
  virtual at::Tensor take_auxiliary_loss() { return {}; }
};

// Returns the loss of the output of the model's last forward() plus take_auxiliary_loss().
at::Tensor with_auxiliary_loss(const at::Tensor& loss, Model& model);

// Returns the output of a model for data (B, ...), without grad and in evaluation mode.
using Inference = std::function<at::Tensor(const at::Tensor& data)>;

// A layer that a sharding strategy may gather on its own.
using LinearUnit = torch::nn::ModuleHolder<ShardUnit<torch::nn::LinearImpl>>;

bool recomputes_activations(const ModelConfig& config);

// Returns layer(input). With is_recomputed only the input is kept, and backward calls the layer
// again. REQUIRES: everything to which the layer refers lives until backward, and the layer changes
// no buffer.
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
