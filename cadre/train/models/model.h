// What the trainer trains: a module from a batch's data to what its loss is computed from.
//
// Threads: as torch::nn::Module. Blocking: never. Errors: c10::Error for wrong shapes.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>

namespace cadre::train {

class Model : public torch::nn::Module {
 public:
  // data: (B, ...); what comes back is (B, ..., classes). B may be 0.
  virtual at::Tensor forward(const at::Tensor& data) = 0;
};

int64_t num_parameters(const torch::nn::Module& model);

}  // namespace cadre::train
