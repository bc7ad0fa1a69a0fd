// AdamW, Adam, SGD and Adagrad of torch::optim with a faster step() that calls libtorch's fused
// kernels, which read and write each parameter once instead of once for each term of the formula.
// Also Adadelta, which libtorch does not have in C++.
//
// Threads: one. Lifetime: shares the parameters, as torch::optim.
// Options, parameter groups, state classes, learning rate schedulers, zero_grad, torch::save and
// torch::load are those of the base class, so either class can resume from the state of the other.
// Results: those of torch::optim within rounding (docs/guide/training/optimizers.md). The result
// for an element is bitwise independent of the tensor or slice of a flat buffer that contains it,
// and of the number of threads (Adadelta: within rounding). Parameters: CPU, any shape and dense
// strides, at any offset of a shared storage; float64, float32, and for all but SGD
// bfloat16 and float16. State has the parameter's dtype, as in torch::optim. It is created at the
// first step in which the parameter has a gradient, also that of Adagrad. A parameter that is
// listed several times is updated as many times, and parameters that share memory are updated one
// after the other. load() keeps the state of a parameter that is listed several times, which
// torch::optim loses. If the parameters are shards, the archive of save() contains the rank, and
// load() throws for the archive of another rank. Errors: kInvalidArgument, before anything is
// changed, for inputs for which a kernel would compute a wrong result (fused_kernels.h), and for a
// group with the options of another optimizer; for the latter also from constructors and
// add_param_group(), which hide those of the base class, because torch::optim silently gives such a
// group the defaults. The message has the parameter's index, counted through all groups from 0, and
// its name if the optimizer was created from named parameters. A parameter without a gradient is
// skipped. step() increments version counters, so that autograd throws in a backward of a forward
// that ran before the step; torch::optim::SGD does not do that. Source: torch.optim with
// fused=True.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "cadre/core/base/export.h"

namespace cadre {

// The type of module.named_parameters().
using NamedParameters = torch::OrderedDict<std::string, at::Tensor>;
// Maps the TensorImpl of a parameter, which is also the key of an optimizer's state, to the
// parameter's name.
using ParameterNames = std::unordered_map<const void*, std::string>;

class CADRE_EXPORT AdamW : public torch::optim::AdamW {
 public:
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 torch::optim::AdamWOptions defaults = {});
  explicit AdamW(std::vector<at::Tensor> parameters, torch::optim::AdamWOptions defaults = {});
  // Creates one group, like torch::optim::AdamW(named_parameters.values(), options), and uses the
  // names in error messages.
  explicit AdamW(const NamedParameters& named_parameters, torch::optim::AdamWOptions options = {});

  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  static constexpr bool kSavesPart = true;

 private:
  ParameterNames names_;
};

class CADRE_EXPORT Adam : public torch::optim::Adam {
 public:
  explicit Adam(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                torch::optim::AdamOptions defaults = {});
  explicit Adam(std::vector<at::Tensor> parameters, torch::optim::AdamOptions defaults = {});
  explicit Adam(const NamedParameters& named_parameters, torch::optim::AdamOptions options = {});

  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  static constexpr bool kSavesPart = true;

 private:
  ParameterNames names_;
};

class CADRE_EXPORT SGD : public torch::optim::SGD {
 public:
  explicit SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups,
               torch::optim::SGDOptions defaults);
  explicit SGD(std::vector<at::Tensor> parameters, torch::optim::SGDOptions defaults);
  explicit SGD(const NamedParameters& named_parameters, torch::optim::SGDOptions options);

  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  static constexpr bool kSavesPart = true;

 private:
  ParameterNames names_;
};

// The initial accumulator value of a parameter is that of its group's options.
class CADRE_EXPORT Adagrad : public torch::optim::Adagrad {
 public:
  explicit Adagrad(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   torch::optim::AdagradOptions defaults = {});
  explicit Adagrad(std::vector<at::Tensor> parameters, torch::optim::AdagradOptions defaults = {});
  explicit Adagrad(const NamedParameters& named_parameters,
                   torch::optim::AdagradOptions options = {});

  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  static constexpr bool kSavesPart = true;

 private:
  ParameterNames names_;
};

// The defaults are those of torch.optim.Adadelta.
struct CADRE_EXPORT AdadeltaOptions
    : public torch::optim::OptimizerCloneableOptions<AdadeltaOptions> {
  AdadeltaOptions(double lr = 1.0);  // the conversion is implicit, as in torch::optim
  TORCH_ARG(double, lr) = 1.0;
  TORCH_ARG(double, rho) = 0.9;
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, weight_decay) = 0;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double value) override { lr(value); }
};

struct CADRE_EXPORT AdadeltaParamState
    : public torch::optim::OptimizerCloneableParamState<AdadeltaParamState> {
  TORCH_ARG(at::Tensor, square_avg);
  TORCH_ARG(at::Tensor, acc_delta);
  TORCH_ARG(int64_t, step) = 0;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// A group with its own options does not inherit values from the defaults. Errors: a torch error for
// options out of range, as in torch::optim. Source: Zeiler, "ADADELTA: an adaptive learning rate
// method", 2012, with the learning rate that PyTorch has added.
class CADRE_EXPORT Adadelta : public torch::optim::Optimizer {
 public:
  explicit Adadelta(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                    AdadeltaOptions defaults = {});
  explicit Adadelta(std::vector<at::Tensor> parameters, AdadeltaOptions defaults = {});
  explicit Adadelta(const NamedParameters& named_parameters, AdadeltaOptions options = {});

  // Hides the method of the base class, which is not virtual and would replace the group's options
  // by the defaults.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  static constexpr bool kSavesPart = true;

 private:
  ParameterNames names_;
};

}  // namespace cadre
