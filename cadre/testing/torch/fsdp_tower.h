// Models that are stacks of equal units ("towers"). Tests train one copy in one process and one
// under FullyShardedDataParallel, and compare the parameters.
//
// Threads: expect_trains_as_plain() makes one for each rank. Blocking: until all ranks have ended.
// Errors: a difference fails the test.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/tensor/hooks/activations/activation_checkpoint.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/testing/torch/fsdp_training.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre::testing {

inline constexpr int64_t kWidth = 5;  // the parameters are not divisible by any number of ranks
inline constexpr int64_t kRows = 12;
inline constexpr int kTowerSteps = 3;

struct Tower : nn::Module {
  explicit Tower(int num_units = 4) {
    for (int i = 0; i < num_units; ++i) {
      units.push_back(register_module("unit" + std::to_string(i), LinearUnit(kWidth, kWidth)));
    }
    head = register_module("head", nn::Linear(kWidth, 1));
    to(kDouble);
    set_values(*this);
  }
  virtual Tensor forward(const Tensor& x) {
    Tensor h = x;
    for (auto& unit : units) h = h + torch::tanh(unit->forward(h));
    return head(h);
  }
  std::vector<LinearUnit> units;
  nn::Linear head{nullptr};
};

// A module that uses the weight of another module (a tied weight).
struct BorrowerImpl : nn::Module {
  explicit BorrowerImpl(const Tensor& lent) { weight = register_parameter("weight", lent); }
  Tensor forward(const Tensor& x) { return torch::matmul(x, weight.t()); }
  Tensor weight;
};

// A tower with units that are frozen in part or as a whole, unused, or tied to another unit.
struct Special : Tower {
  Special() : Tower(4) {
    units[1]->weight.requires_grad_(false);
    for (auto& parameter : units[2]->parameters()) parameter.requires_grad_(false);
    unused = register_module("unused", LinearUnit(2, 3));
    unused->to(kDouble);
    set_values(*unused);
    borrower =
        register_module("borrower", nn::ModuleHolder<ShardUnit<BorrowerImpl>>(units[0]->weight));
  }
  Tensor forward(const Tensor& x) override { return Tower::forward(borrower(x)); }
  LinearUnit unused{nullptr};
  nn::ModuleHolder<ShardUnit<BorrowerImpl>> borrower{nullptr};
};

// A tower with parameters in two dtypes.
struct MixedTower : Tower {
  MixedTower() : Tower(2) { scale = register_parameter("scale", torch::ones({3}, torch::kFloat)); }
  Tensor forward(const Tensor& x) override { return Tower::forward(x * scale.sum().to(kDouble)); }
  Tensor scale;
};

// One layer of Tower with the operations around it, as a module that can be a unit.
struct HalfImpl : nn::LinearImpl {
  using nn::LinearImpl::LinearImpl;
  Tensor forward(const Tensor& h) { return h + torch::tanh(nn::LinearImpl::forward(h)); }
};

// A tower whose units use activation checkpointing.
struct Recomputed : nn::Module {
  using Unit = nn::ModuleHolder<ShardUnit<ActivationCheckpoint<HalfImpl>>>;
  Recomputed() {
    for (int i = 0; i < 4; ++i) {
      units.push_back(register_module("unit" + std::to_string(i), Unit(kWidth, kWidth)));
    }
    head = register_module("head", nn::Linear(kWidth, 1));
    to(kDouble);
    set_values(*this);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = x;
    for (auto& unit : units) h = unit->forward(h);
    return head(h);
  }
  std::vector<Unit> units;
  nn::Linear head{nullptr};
};

// Returns the number of bytes of the flat buffer of a Linear(kWidth, num_outputs).
inline int64_t bytes_of_linear(int64_t num_outputs, int world_size) {
  const int64_t alignment = shard::FlatParametersOptions().alignment;
  const shard::FlatLayout layout({num_outputs * kWidth, num_outputs}, world_size,
                                 {.of_shards = alignment, .of_tensors = alignment});
  return layout.numel() * static_cast<int64_t>(sizeof(double));
}

inline Tensor data_of(int step) {
  return torch::sin(torch::arange(kRows * kWidth, kDouble) + 7 * step).view({kRows, kWidth});
}

inline Tensor rows_of(const ProcessGroup& group, int step) {
  const Share share = share_of(kRows, group.rank(), group.world_size());
  return data_of(step).narrow(0, share.begin, share.size());
}

inline FullyShardedDataParallelOptions every_unit() {
  return {.wrap_policy = wrap_shard_units()};
}

// Runs the forward and backward of one step, without the optimizer. `model` is the plain module or
// its wrapper.
struct PlainSteps {
  template <typename Model>
  void operator()(Model& model, const Tensor& rows) const {
    model.forward(rows).pow(2).mean().backward();
  }
};

// Runs a step as two backwards, one for each half of the rows. Without kReduceEvery the first one
// runs under no_sync().
template <bool kReduceEvery>
struct Accumulation {
  template <typename Model>
  void operator()(Model& model, const Tensor& rows) const {
    const auto half = [&](int64_t begin) {
      (model.forward(rows.slice(0, begin, std::nullopt, 2)).pow(2).mean() / 2).backward();
    };
    if constexpr (!kReduceEvery && requires { model.no_sync(); }) {
      const auto guard = model.no_sync();
      half(0);
    } else {
      half(0);
    }
    half(1);
  }
};

// Returns each parameter once (a tied one too), in the order in which the wrapper lists them.
template <typename M>
std::vector<Tensor> parameters_of(const M& module) {
  std::vector<Tensor> parameters;
  for (const NamedTensor& parameter : distinct_parameters(module)) {
    parameters.push_back(parameter.tensor);
  }
  return parameters;
}

template <typename M, typename Step>
Snapshot train_plain(const std::shared_ptr<M>& module, Step step) {
  torch::optim::SGD sgd(parameters_of(*module), 0.1);
  for (int i = 0; i < kTowerSteps; ++i) {
    sgd.zero_grad();
    step(*module, data_of(i));
    sgd.step();
  }
  return copies_of(parameters_of(*module));
}

template <typename M, typename Step>
Snapshot train_wrapped(FullyShardedDataParallel<M>& model, const ProcessGroup& group, Step step) {
  torch::optim::SGD sgd(model.parameters(), 0.1);
  for (int i = 0; i < kTowerSteps; ++i) {
    sgd.zero_grad();
    step(model, rows_of(group, i));
    sgd.step();
  }
  return assembled_parameters(model, group);
}

inline void expect_equal(const Snapshot& actual, const Snapshot& expected,
                         double tolerance = 1e-12) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::allclose(actual[i], expected[i], tolerance, tolerance))
        << "parameter " << i << "\n"
        << actual[i] << "\n"
        << expected[i];
  }
}

template <typename Make, typename Step = PlainSteps>
void expect_trains_as_plain(Make make, const FullyShardedDataParallelOptions& options,
                            Step step = {}, const std::vector<int>& world_sizes = {1, 2, 3}) {
  const Snapshot expected = train_plain(make(), step);
  for (const int world_size : world_sizes) {
    SCOPED_TRACE(std::to_string(world_size) + " ranks");
    const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
      const auto module = make();
      FullyShardedDataParallel model{module, group, options};
      const Snapshot trained = train_wrapped(model, group, step);
      expect_equal(trained, expected);
      EXPECT_EQ(model.full_bytes(), 0);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

}  // namespace cadre::testing
