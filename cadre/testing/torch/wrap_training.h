// Trains a model for the equality tests: 20 steps of SGD or AdamW, in one process or as one of
// several ranks.
//
// Threads: one for each model.
#pragma once

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/testing/torch/group_fakes.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/wrap_models.h"
#include "cadre/train/verify/stepped_training.h"

namespace cadre::testing {

inline constexpr int kSteps = 20;
inline constexpr double kLearningRateOfSgd = 0.05;
inline constexpr double kLearningRateOfAdamw = 0.003;
inline constexpr double kBeta1 = 0.9;
inline constexpr double kBeta2 = 0.999;
inline constexpr double kEpsilon = 1e-8;

// The rows [begin, end) of a batch that belong to one rank. share_of() gives any two ranks numbers
// of rows that differ by at most one.
struct Share {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
};

inline Share share_of(int64_t batch, int rank, int world_size) {
  return {batch * rank / world_size, batch * (rank + 1) / world_size};
}

// One tensor for each parameter: its value or its gradient, undefined if it has no gradient.
using Snapshot = std::vector<Tensor>;

struct Training {
  std::vector<double> losses;       // the losses of all steps, as the training reports them
  std::vector<Snapshot> gradients;  // the gradients of all steps, before the update
  Snapshot parameters;
};

// Returns each parameter once.
inline std::vector<Tensor> parameters_of(const nn::Module& module) {
  std::vector<Tensor> parameters;
  for (const NamedTensor& parameter : distinct_parameters(module)) {
    parameters.push_back(parameter.tensor);
  }
  return parameters;
}

inline torch::optim::SGDOptions sgd_options() {
  return torch::optim::SGDOptions(kLearningRateOfSgd).momentum(0.9);
}

inline torch::optim::AdamWOptions adamw_options() {
  return torch::optim::AdamWOptions(kLearningRateOfAdamw).betas({kBeta1, kBeta2}).eps(kEpsilon);
}

// Makes the optimizer of libtorch that the test case names.
inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Case& test_case,
                                                               const std::vector<Tensor>& tensors) {
  if (test_case.optimizer == "sgd") {
    return std::make_unique<torch::optim::SGD>(tensors, sgd_options());
  }
  return std::make_unique<torch::optim::AdamW>(tensors, adamw_options());
}

inline Snapshot copies_of(const std::vector<Tensor>& tensors) {
  Snapshot copies;
  for (const Tensor& tensor : tensors) {
    copies.push_back(tensor.defined() ? tensor.detach().clone() : Tensor());
  }
  return copies;
}

inline Snapshot gradients_of(const Model& model) {
  Snapshot gradients;
  for (const Tensor& parameter : parameters_of(model)) gradients.push_back(parameter.grad());
  return copies_of(gradients);
}

// Trains the model on all batches. loss_of_batch() runs the model on this rank's rows of a batch
// and returns their loss. after_backward() sums gradients over the ranks if no wrapper does that.
inline Training train(
    const Case& test_case, Model& model, const std::vector<Tensor>& batches,
    const std::function<Tensor(const Tensor&)>& loss_of_batch,
    const std::function<void()>& after_backward = [] {}) {
  Training training;
  const auto optimizer = make_optimizer(test_case, parameters_of(model));
  for (const Tensor& batch : batches) {
    optimizer->zero_grad();
    const Tensor loss = loss_of_batch(batch);
    loss.backward();
    after_backward();
    training.losses.push_back(loss.item<double>());
    training.gradients.push_back(gradients_of(model));
    optimizer->step();
  }
  training.parameters = copies_of(parameters_of(model));
  return training;
}

inline std::string bits_of(const Snapshot& tensors) {
  std::string bits;
  for (const Tensor& tensor : tensors) {
    bits.push_back(tensor.defined() ? '1' : '0');
    if (!tensor.defined()) continue;
    bits.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return bits;
}

// Returns copies of the tensors with these names, in the order of `names`.
inline Snapshot in_order(const std::vector<std::string>& names,
                         const std::vector<NamedTensor>& named) {
  std::vector<Tensor> tensors;
  for (const std::string& name : names) {
    const auto found = std::ranges::find(named, name, &NamedTensor::name);
    require(found != named.end(), "the training has no parameter " + name);
    tensors.push_back(found->tensor);
  }
  return copies_of(tensors);
}

// Trains for num_steps steps. The tensors of the result are in the order of `names`, the parameters
// of the plain module.
inline Training train_in_steps(verify::SteppedTraining& stepped,
                               const std::vector<std::string>& names, size_t num_steps) {
  Training training;
  for (size_t i = 0; i < num_steps; ++i) {
    const auto step = static_cast<int64_t>(i + 1);
    training.losses.push_back(stepped.backward(step));
    training.gradients.push_back(in_order(names, stepped.gradients()));
    stepped.update(step);
  }
  training.parameters = in_order(names, stepped.parameters());
  stepped.close();
  return training;
}

// Returns the names of the module's parameters, each (also a tied one) once.
inline std::vector<std::string> parameter_names_of(const nn::Module& module) {
  std::vector<std::string> names;
  for (const NamedTensor& parameter : distinct_parameters(module)) names.push_back(parameter.name);
  return names;
}

inline std::vector<Tensor> make_batches(const Case& test_case, uint64_t seed) {
  const auto source = make_model(test_case, seed);
  torch::manual_seed(seed + 98);
  std::vector<Tensor> batches;
  for (int step = 0; step < kSteps; ++step) batches.push_back(source->make_batch(test_case.batch));
  return batches;
}

inline Training train_alone(const Case& test_case, const std::vector<Tensor>& batches,
                            uint64_t seed) {
  const auto model = make_model(test_case, seed);
  return train(test_case, *model, batches,
               [&](const Tensor& batch) { return model->loss(model->forward(batch), batch); });
}

}  // namespace cadre::testing
