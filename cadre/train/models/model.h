// What the trainer trains: a module from a batch's data to what its loss is computed from.
//
// Threads: as torch::nn::Module. Blocking: never. Errors: c10::Error for wrong shapes.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <functional>

#include "cadre/parallel/fsdp/shard_unit.h"

namespace cadre::train {

class Model : public torch::nn::Module {
 public:
  // data: (B, ...); what comes back is (B, ..., classes). B may be 0.
  virtual at::Tensor forward(const at::Tensor& data) = 0;
};

// What comes out of a trained model for data, (B, ...), without grad and in evaluation mode.
using Inference = std::function<at::Tensor(const at::Tensor& data)>;

// A layer that a sharding strategy may gather by itself.
using LinearUnit = torch::nn::ModuleHolder<ShardUnit<torch::nn::LinearImpl>>;

int64_t num_parameters(const torch::nn::Module& model);

}  // namespace cadre::train
