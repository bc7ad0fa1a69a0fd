// Optimizers of the trainer: on libtorch's fused kernels if there is one (AdamW, Adam, SGD,
// Adagrad: one pass over a parameter instead of five), otherwise with the formulas of torch.optim
// (RMSprop, Adadelta).
//
// Threads: one. Blocking: never. Lifetime: shares the parameters. State is allocated at the first
// gradient of a parameter. Results equal those of torch.optim within rounding (measured: 3e-7
// relative). Errors: kInvalidArgument, with the parameter's name, for tensors that the kernels
// would accept and compute wrongly (tensor/optim/fused_kernels.h); a gradient with other strides
// than its parameter is copied into the parameter's strides. Source: at::_fused_adamw_ and its
// siblings; formulas and state names are torch.optim's.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/tensor/optim/fused_kernels.h"
#include "cadre/train/checkpoint/module_file.h"
#include "cadre/train/trainer/config/config.h"

namespace cadre::train {

// A parameter, or this rank's shard of one.
struct TrainedTensor {
  std::string name;
  at::Tensor tensor;
  // Whether weight decay applies: the whole parameter has two or more dimensions, so it is neither
  // a bias nor a parameter of a norm.
  bool is_decayed = false;
};

std::vector<TrainedTensor> trained_tensors(const std::vector<NamedTensor>& parameters);

class Optimizer {
 public:
  Optimizer(std::vector<TrainedTensor> parameters, double weight_decay);
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Updates every parameter that has a gradient.
  void step(double learning_rate);
  void zero_grad();

  // Named "<parameter>.<state>", for snapshots. The tensors are the optimizer's own, not copies.
  std::vector<NamedTensor> state() const;
  // REQUIRES: a result of state(). Throws kInvalidArgument, and changes nothing, for an unknown or
  // missing name or another shape: the state of an optimizer with other settings.
  void load_state(const std::vector<NamedTensor>& state);

 protected:
  // The parameters of one kernel call, and their state tensors by name.
  struct Batch {
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> gradients;
    std::map<std::string, std::vector<at::Tensor>> state;
  };
  struct Hyperparameters {
    double learning_rate = 0;
    double weight_decay = 0;
  };

  // The state tensors of a parameter, with their initial values.
  virtual std::vector<NamedTensor> initial_state(const at::Tensor& parameter) const = 0;
  // Runs the kernel. `is_first`: no parameter of the batch has been updated before.
  virtual void update(Batch& batch, const Hyperparameters& hyper, bool is_first) = 0;
  // What `update` computes.
  virtual std::span<const at::ScalarType> dtypes() const { return kAdamDtypes; }

 private:
  at::Tensor checked_gradient(size_t index) const;
  void make_state(size_t index);

  std::vector<TrainedTensor> parameters_;
  double weight_decay_;
  std::vector<std::map<std::string, at::Tensor>> state_;  // by parameter; empty before its first
};

std::unique_ptr<Optimizer> make_optimizer(std::vector<TrainedTensor> parameters,
                                          const OptimizerConfig& config);

}  // namespace cadre::train
