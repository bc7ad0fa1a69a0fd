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

// Which rows of the batches of a run a forward is given: for dropout that depends on the sample.
struct SampledRows {
  int64_t step = 0;
  int64_t first = 0;   // in the batch of all processes
  int64_t stride = 1;  // from one row to the next
};

class Model : public torch::nn::Module {
 public:
  // data: (B, ...); returns (B, ..., classes). B may be 0.
  virtual at::Tensor forward(const at::Tensor& data) = 0;
  // Before a forward in training, and its backward.
  virtual void set_rows(const SampledRows& /*rows*/) {}
  // What the last forward() adds to the loss of its output, (), with its weight, once; undefined:
  // it adds nothing. Its graph is a part of that of the output.
  virtual at::Tensor take_auxiliary_loss() { return {}; }
};

// The loss of an output of the model's last forward() with what that adds to it.
at::Tensor with_auxiliary_loss(const at::Tensor& loss, Model& model);

// The output of a model for data (B, ...), without grad and in evaluation mode.
using Inference = std::function<at::Tensor(const at::Tensor& data)>;

// A layer that a sharding strategy may gather on its own.
using LinearUnit = torch::nn::ModuleHolder<ShardUnit<torch::nn::LinearImpl>>;

bool recomputes_activations(const ModelConfig& config);

// layer(input). If it is recomputed, only the input is kept, and backward calls the layer again.
// REQUIRES: everything to which the layer refers lives until backward, and the layer changes no
// buffer.
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

// A linear layer and its activation function. (..., num_inputs) to (..., num_outputs).
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
