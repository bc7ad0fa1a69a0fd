// A small network whose layers are units with FlatParameters. It is trained without a wrapper, by
// the same calls that a wrapper makes. Tests of mapped shards (which other ranks read in place)
// compare its results with those of gathered shards.
//
// Threads: one for each rank. Blocking: that of the group. Errors: those of FlatParameters. For
// tests only.
#pragma once

#include <torch/optim/adamw.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {

inline void nap(const ProcessGroup& group, Duration duration) {
  os::System& system = group.communicator().system();
  const Deadline end = system.deadline_in(duration);
  const auto waiter = system.make_waiter();
  while (!end.has_passed(system.now())) waiter->park(end);
}

inline void require_in(const std::string& text, const std::string& part) {
  require(text.find(part) != std::string::npos, text + "\n  lacks: " + part);
}

inline bool bits_equal(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!torch::equal(a[i], b[i])) return false;
  }
  return a.size() == b.size();
}

inline torch::Tensor parameter_of(const torch::Tensor& values) {
  return values.clone().requires_grad_(true);
}

// An AdamW whose step() first calls `pause`, so that a test can delay the update.
class PausingAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  std::function<void()> pause = [] {};

  torch::Tensor step(LossClosure closure = nullptr) override {
    pause();
    return torch::optim::AdamW::step(std::move(closure));
  }
};

// The minimal "model" from which a ShardedOptimizer can be constructed: the leaves of all
// FlatParameters, and their common fence, which separates writes of shards from reads by other
// ranks.
struct FencedLeaves {
  std::shared_ptr<shard::ShardFence> fence;
  std::vector<torch::Tensor> leaves;

  std::shared_ptr<shard::ShardFence> shard_fence() const { return fence; }
  std::vector<torch::Tensor> parameters() const { return leaves; }
};

struct ShardedTrainingOptions {
  shard::FlatParametersOptions flat = {};
  torch::ScalarType dtype = torch::kFloat;
  // The sizes of the hidden layers. Each layer is a unit, with its bias.
  std::vector<int64_t> widths = {7, 40, 33, 5};
  // Called before each call to the units and to the optimizer, to shift the timing of ranks.
  std::function<void()> pause = [] {};
};

inline ShardedTrainingOptions mapped(ShardedTrainingOptions options = {}) {
  options.flat.form = ShardForm::kMapped;
  return options;
}

// A network of units that compute y = tanh(W x + b). The ranks have different inputs.
class ShardedTraining {
 public:
  using Options = ShardedTrainingOptions;

  ShardedTraining(const ProcessGroup& group, Options options)
      : group_(group), options_(std::move(options)) {
    options_.flat.fence = std::make_shared<shard::ShardFence>();
    for (size_t i = 0; i + 1 < options_.widths.size(); ++i) {
      weights.push_back(numbers({options_.widths[i + 1], options_.widths[i]}, 0.3));
      biases.push_back(numbers({options_.widths[i + 1]}, 0.7));
      shard::FlatParametersOptions flat = options_.flat;
      flat.name = "of unit " + std::to_string(i);
      units.push_back(std::make_unique<shard::FlatParameters>(
          std::vector<NamedTensor>{{"weight", weights[i]}, {"bias", biases[i]}}, group, flat));
    }
    std::vector<torch::Tensor> leaves;
    for (const auto& unit : units) {
      for (size_t k = 0; k < unit->parameters().size(); ++k) leaves.push_back(unit->values(k));
    }
    optimizer = std::make_unique<ShardedOptimizer<PausingAdamW>>(
        FencedLeaves{options_.flat.fence, leaves},
        torch::optim::AdamWOptions(0.05).weight_decay(0.01));
  }

  // Runs a forward and a backward and reduces the gradients. Returns the loss of this rank.
  double backward(int step) {
    optimizer->zero_grad();
    const torch::Tensor loss = forward(step, /*keeps=*/true).pow(2).sum();
    loss.backward();
    for (const auto& unit : units) {
      options_.pause();
      unit->reshard();
      reduce(*unit);
    }
    return loss.item<double>();
  }

  // Computes the loss with the whole network, without recording gradients.
  double evaluate(int step) {
    const torch::NoGradGuard no_grad;
    return forward(step, /*keeps=*/false).pow(2).sum().item<double>();
  }

  void update() {
    options_.pause();
    optimizer->step();
  }

  // Trains and returns two losses for each step on this rank: that of the backward, and one that is
  // evaluated between the backward and the optimizer's step.
  std::vector<double> train(int num_steps) {
    std::vector<double> losses;
    for (int step = 0; step < num_steps; ++step) {
      losses.push_back(backward(step));
      losses.push_back(evaluate(step));
      update();
    }
    return losses;
  }

  // Gathers all parameters and returns copies of them.
  std::vector<torch::Tensor> values() {
    std::vector<torch::Tensor> values;
    for (const auto& unit : units) {
      unit->unshard_async();
      unit->wait_unsharded();
      for (const NamedTensor& parameter : unit->parameters()) {
        values.push_back(parameter.tensor.detach().clone());
      }
      unit->reshard();
    }
    return values;
  }

  torch::Tensor input(int step, int rank) const {
    return torch::sin(torch::arange(3 * options_.widths[0], torch::kDouble) + step + 10 * rank)
        .view({3, options_.widths[0]})
        .to(compute_dtype());
  }

  std::vector<torch::Tensor> weights;
  std::vector<torch::Tensor> biases;
  std::vector<std::unique_ptr<shard::FlatParameters>> units;
  std::unique_ptr<ShardedOptimizer<PausingAdamW>> optimizer;

 private:
  torch::ScalarType compute_dtype() const {
    return options_.flat.compute_dtype.value_or(options_.dtype);
  }
  torch::Tensor numbers(torch::IntArrayRef sizes, double first) const {
    const auto numel = c10::multiply_integers(sizes);
    return torch::sin(torch::arange(numel, torch::kDouble) + first)
        .mul(0.5)
        .view(sizes)
        .to(options_.dtype)
        .requires_grad_(true);
  }

  // If `keeps`, units stay gathered until their backward has ended.
  torch::Tensor forward(int step, bool keeps) {
    torch::Tensor x = input(step, group_.rank());
    for (size_t i = 0; i < units.size(); ++i) {
      options_.pause();
      units[i]->unshard_async();
      options_.pause();
      units[i]->wait_unsharded();
      options_.pause();
      x = torch::tanh(torch::linear(x, weights[i], biases[i]));
      if (!keeps) units[i]->reshard();
    }
    return x;
  }

  // Reduces the gradients of a unit to this rank's shard, in the dtype of the shard.
  void reduce(shard::FlatParameters& unit) {
    const shard::FlatLayout& layout = unit.layout();
    const torch::Tensor full = torch::zeros({layout.numel()}, options_.dtype);
    for (size_t k = 0; k < layout.num_parameters(); ++k) {
      const torch::Tensor& parameter = unit.parameters()[k].tensor;
      full.narrow(0, layout.offset(k), layout.numel(k)).copy_(parameter.grad().flatten());
      parameter.mutable_grad().reset();
    }
    const torch::Tensor part = torch::empty({layout.shard_numel()}, options_.dtype);
    group_.reduce_scatter(part, full, {.op = ReduceOp::kAvg});
    for (size_t k = 0; k < layout.num_parameters(); ++k) {
      unit.values(k).mutable_grad() =
          part.narrow(0, layout.offset_in_shard(k, group_.rank()), unit.values(k).numel()).clone();
    }
  }

  ProcessGroup group_;
  Options options_;
};

}  // namespace cadre::testing
