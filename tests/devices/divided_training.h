// Training of divided models on devices, for tests that compare it with one process on the CPU. The
// host reads results at the end only, so that kernels of a step may run while the host is in later
// ones.
//
// Threads: one for each model. Blocking: as the model, and at the end for the device.
#pragma once

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <functional>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/joined_training.h"

namespace cadre::testing {

// All tensors are on the CPU. gradients: those of the last step.
struct DividedTraining {
  std::vector<Tensor> losses;
  Snapshot gradients;
  Snapshot parameters;
};

inline Snapshot on_cpu(const std::vector<Tensor>& tensors) {
  Snapshot copies;
  for (const Tensor& tensor : tensors) {
    copies.push_back(tensor.defined() ? tensor.detach().cpu() : Tensor());
  }
  return copies;
}

inline DividedTraining train_divided(
    const std::vector<Tensor>& parameters, const std::vector<Tensor>& batches,
    const std::function<Tensor(const Tensor&)>& loss_of_batch,
    const std::function<void()>& after_backward = [] {}) {
  DividedTraining training;
  torch::optim::SGD optimizer(parameters, sgd_options());
  for (const Tensor& batch : batches) {
    optimizer.zero_grad();
    const Tensor loss = loss_of_batch(batch);
    loss.backward();
    after_backward();
    training.losses.push_back(loss.detach());
    training.gradients.clear();
    for (const Tensor& parameter : parameters) training.gradients.push_back(parameter.grad());
    training.gradients = copies_of(training.gradients);
    optimizer.step();
  }
  training.losses = on_cpu(training.losses);
  training.gradients = on_cpu(training.gradients);
  training.parameters = on_cpu(parameters);
  return training;
}

inline std::vector<Tensor> moved_to(const std::vector<Tensor>& batches, c10::Device device) {
  std::vector<Tensor> moved;
  for (const Tensor& batch : batches) moved.push_back(batch.to(device));
  return moved;
}

// Throws unless the tensors are equal within a few roundings of float64.
inline void require_close(const Snapshot& found, const Snapshot& expected,
                          const std::string& what) {
  require(found.size() == expected.size(), what);
  for (size_t i = 0; i < found.size(); ++i) {
    require(found[i].defined() == expected[i].defined(), format("{} {} is undefined", what, i));
    if (!found[i].defined() || found[i].numel() == 0) continue;
    const double difference = (found[i] - expected[i]).abs().max().item<double>();
    const double largest = expected[i].abs().max().item<double>();
    require(difference <= 1e-10 * largest + 1e-13,
            format("{} {} differs by {} of {}", what, i, difference, largest));
  }
}

inline void require_close(const DividedTraining& found, const DividedTraining& expected) {
  require_close(found.losses, expected.losses, "loss");
  require_close(found.gradients, expected.gradients, "gradient");
  require_close(found.parameters, expected.parameters, "parameter");
}

// Joins the parts of the ranks. The losses are those of rank 0.
inline DividedTraining joined(const DividedDims& dims, const std::vector<DividedTraining>& ranks) {
  std::vector<Snapshot> gradients, parameters;
  for (const DividedTraining& rank : ranks) {
    gradients.push_back(rank.gradients);
    parameters.push_back(rank.parameters);
  }
  return {.losses = ranks[0].losses,
          .gradients = joined(dims, gradients),
          .parameters = joined(dims, parameters)};
}

}  // namespace cadre::testing
