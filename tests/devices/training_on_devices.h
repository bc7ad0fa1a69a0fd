// A model of units and its training, for the tests of sharded wrappers on the late device. The
// truth is the same training in one process on the CPU.
//
// Threads: as the calls of the wrappers. For tests only.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/fsdp/shard_unit.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/late_device/late_device.h"

namespace cadre::testing {

inline constexpr int kNumSteps = 4;
inline constexpr int64_t kNumRows = 12;
inline constexpr int64_t kUnitWidth = 6;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    up = register_module("up", torch::nn::Linear(kUnitWidth, 9));
    down = register_module("down", torch::nn::Linear(9, kUnitWidth));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (throws_next) {
      throws_next = false;
      throw std::runtime_error("a block that fails");
    }
    return x + down(torch::tanh(up(x)));
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  bool throws_next = false;
};
using Block = torch::nn::ModuleHolder<ShardUnit<BlockImpl>>;

// Three units, and parameters of the root, one of which is used at both ends (a tied weight).
struct UnitNet : torch::nn::Module {
  UnitNet() {
    first = register_module("first", torch::nn::Linear(5, kUnitWidth));
    tied = register_module("tied", torch::nn::Linear(kUnitWidth, kUnitWidth));
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(register_module(format("block{}", i), Block()));
    }
    last = register_module("last", tied);
    to(torch::kDouble);
    set_values();
  }
  void set_values() {
    const torch::NoGradGuard no_grad;
    double start = 0;
    for (at::Tensor& parameter : parameters()) {
      const at::Tensor values =
          torch::sin(torch::arange(parameter.numel(), torch::kDouble) + ++start);
      parameter.copy_(values.view_as(parameter));
    }
  }
  void freeze_some() {
    blocks[0]->up->weight.set_requires_grad(false);
    blocks[2]->down->bias.set_requires_grad(false);
    first->bias.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = torch::tanh(tied(first(x)));
    for (Block& block : blocks) y = block->forward(y);
    return last(y);
  }
  torch::nn::Linear first{nullptr}, tied{nullptr}, last{nullptr};
  std::vector<Block> blocks;
};

inline at::Tensor inputs_of(int step) {
  const at::Tensor x = torch::cos(torch::arange(kNumRows * 5, torch::kDouble) * (0.7 * step + 1));
  return x.view({kNumRows, 5});
}

inline at::Tensor loss_of(const at::Tensor& output) {
  return output.to(torch::kDouble).square().mean();
}

// The rows of a rank, an uneven share.
struct Rows {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
inline Rows rows_of(int rank, int num_ranks) {
  if (num_ranks == 1) return {0, kNumRows};
  const int64_t per_rank = (kNumRows - 3) / (num_ranks - 1);
  const int64_t begin = rank == 0 ? 0 : 3 + per_rank * (rank - 1);
  return {begin, rank + 1 == num_ranks ? kNumRows : rank == 0 ? 3 : begin + per_rank};
}

using Values = std::map<std::string, at::Tensor>;

inline Values values_of(const torch::nn::Module& module) {
  Values values;
  for (const auto& item : module.named_parameters()) {
    values[item.key()] = item.value().detach().cpu().clone();
  }
  return values;
}

inline void require_close(const Values& found, const Values& expected, double tolerance,
                          const std::string& what) {
  for (const auto& [name, value] : found) {
    const auto truth = expected.find(name);
    require(truth != expected.end(), what + ": no parameter " + name);
    const double difference = (value - truth->second).abs().max().item<double>();
    require(difference <= tolerance,
            format("{}: {} differs by {}, more than {}", what, name, difference, tolerance));
  }
}

// Returns which operations the host has waited for on a late device since `before`; "" if none.
inline std::string waits_since(const late::Counts& before, int index) {
  const late::Counts after = late::counts(index);
  std::string text;
  for (const auto& [name, number] : after.synchronous) {
    const auto known = before.synchronous.find(name);
    const uint64_t earlier = known == before.synchronous.end() ? 0 : known->second;
    if (number > earlier) text += format("{} x {}; ", number - earlier, name);
  }
  if (after.waits > before.waits) text += format("{} waits", after.waits - before.waits);
  return text;
}

}  // namespace cadre::testing
