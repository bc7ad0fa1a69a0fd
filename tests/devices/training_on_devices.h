// A model of units and its training, for the tests of sharded wrappers on the late device. The
// truth is the same training in one process on the CPU.
//
// Threads: as the calls of the wrappers. For tests only.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/fsdp/shard_unit.h"
#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/parallel/shard/grad_scaler.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/tensor/hooks/gradient_norm.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "on_devices.h"

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

// Returns all parameters of a sharded model, on the CPU. A collective of its ranks.
template <typename Model>
Values whole_values_of(const Model& model) {
  Values values;
  for (const NamedTensor& named : shard::gather_values(model.parameter_shards())) {
    values[named.name] = named.tensor.cpu();
  }
  return values;
}

inline double largest_difference(const Values& found, const Values& expected) {
  double largest = 0;
  for (const auto& [name, value] : found) {
    largest = std::max(largest, (value - expected.at(name)).abs().max().item<double>());
  }
  return largest;
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

// What a training does beside forward, backward and step.
struct TrainingProgram {
  std::string name;
  bool has_frozen = false;
  bool accumulates = false;   // two backwards a step, the first without reduction
  bool adds_reduced = false;  // two backwards a step, both of which reduce
  bool zeroes = false;        // zero_grad(false)
  std::optional<double> max_norm = {};
  double norm_type = 2;
  bool overflows = false;  // with a GradScaler; the loss of step 1 overflows

  int num_parts() const { return accumulates || adds_reduced ? 2 : 1; }
  // Returns how often the host waits in a step in which nothing overflows: once for the norm, and
  // once to learn whether the gradients are finite.
  uint64_t num_waits() const { return (max_norm ? 1 : 0) + (overflows ? 1 : 0); }
};

inline torch::optim::AdamWOptions adamw() {
  return torch::optim::AdamWOptions(0.05).weight_decay(0.1);
}

// Runs the steps of a program. `backward(step, part, factor)` runs a forward and a backward of a
// part of the step. `gradients` is what GradScaler and clip_grad_norm_() take.
template <typename Optimizer, typename Gradients>
void run_steps(const TrainingProgram& program, Optimizer& optimizer, Gradients& gradients,
               const std::function<void(int step, int part, double factor)>& backward) {
  GradScaler scaler({.initial_scale = 1024});
  const auto clip = [&] {
    if (!program.max_norm) return;
    clip_grad_norm_(gradients, *program.max_norm, {.norm_type = program.norm_type});
  };
  for (int step = 0; step < kNumSteps; ++step) {
    optimizer.zero_grad(!program.zeroes);
    double factor = program.overflows ? scaler.state().scale : 1;
    if (program.overflows && step == 1) factor = std::numeric_limits<double>::infinity();
    for (int part = 0; part < program.num_parts(); ++part) backward(step, part, factor);
    if (!program.overflows) {
      clip();
      optimizer.step();
      continue;
    }
    if (scaler.unscale_(gradients)) clip();
    scaler.step(optimizer);
    scaler.update();
  }
}

// Trains in one process on the CPU, on all rows.
inline Values trained_alone(const TrainingProgram& program) {
  UnitNet net;
  if (program.has_frozen) net.freeze_some();
  std::vector<at::Tensor> distinct;  // a tied weight is updated once
  for (const NamedTensor& named : distinct_parameters(net)) distinct.push_back(named.tensor);
  AdamW optimizer(distinct, adamw());
  const std::span<const at::Tensor> gradients = distinct;
  run_steps(program, optimizer, gradients, [&](int step, int /*part*/, double factor) {
    (loss_of(net.forward(inputs_of(step))) * (factor / program.num_parts())).backward();
  });
  return values_of(net);
}

inline std::shared_ptr<UnitNet> net_on(const c10::Device& device, bool has_frozen = false) {
  auto net = std::make_shared<UnitNet>();
  if (has_frozen) net->freeze_some();
  net->to(device);
  return net;
}

// The number of steps whose waits are counted. In them no loss overflows.
inline constexpr int kNumCounted = 2;

// Trains under a wrapper, on this rank's rows. The host copies them before the first step, so that
// it never waits for the device unless a step does. Returns "" if the last steps have waited for
// the device as often as the program makes them, else a sentence.
template <typename Model, typename Optimizer>
std::string train_on_rows(const TrainingProgram& program, Model& model, Optimizer& optimizer,
                          const ProcessGroup& group, const c10::Device& device) {
  const Rows rows = rows_of(group.rank(), group.world_size());
  std::vector<at::Tensor> batches;
  for (int step = 0; step < kNumSteps; ++step) {
    batches.push_back(inputs_of(step).slice(0, rows.begin, rows.end).to(device));
  }
  const bool is_counted = device.type() == late::device().type();
  late::Counts before;
  run_steps(program, optimizer, model, [&](int step, int part, double factor) {
    if (step + kNumCounted == kNumSteps && part == 0 && is_counted) {
      before = late::counts(device.index());
    }
    const at::Tensor& x = batches[static_cast<size_t>(step)];
    if (!program.accumulates) {
      (loss_of(model(x)) * (factor / program.num_parts())).backward();
      return;
    }
    // The parts have other sizes than a half, and the loss is the mean of all rows.
    const auto size = static_cast<double>(x.size(0));
    if (part == 0) {
      const auto no_sync = model.no_sync({.losses_are_weighted = true});
      (loss_of(model(x.slice(0, 0, 1))) * (factor / size)).backward();
    } else {
      (loss_of(model(x.slice(0, 1))) * (factor * (size - 1) / size)).backward();
    }
  });
  if (!is_counted) return "";
  const uint64_t number = num_waits_since(before, device.index());
  if (late::counts(device.index()).kernels == before.kernels) return "no step ran on the device";
  if (number == kNumCounted * program.num_waits()) return "";
  return format("{}: {} steps waited {} times: {}", program.name, kNumCounted, number,
                waits_since(before, device.index()));
}

// The stream of the training: that on which the wrapper is constructed, or another one. A wrapper
// may also be constructed on a stream that is not the default one.
enum class Streams { kOne, kTwo, kNotTheDefault };

// Tests of a wrapper on devices. The truth is one process on the CPU.
class TrainingOnDevices : public OnDevices {
 protected:
  // Trains on a device and returns the parameters.
  template <typename Case>
  using Train =
      std::function<Values(const Case& of, const ProcessGroup& group, const c10::Device& device)>;

  // The units of the model have several pieces. Smaller ones take ten times as long.
  size_t piece_bytes() const override { return 256; }

  // Each case has a TrainingProgram, `program`.
  template <typename Case>
  void expect_one_process(const Case& of, int num_ranks, const Train<Case>& train,
                          const std::string& what) {
    const Values& expected = alone(of.program);
    expect_on_all(num_ranks, [&](const ProcessGroup& group, const c10::Device& device) {
      require_close(train(of, group, device), expected, 1e-9,
                    format("{}, {} ranks, {}", of.program.name, num_ranks, what));
    });
  }

  // Returns trained_alone(), which is computed once for each program.
  const Values& alone(const TrainingProgram& program) {
    const auto known = alone_.find(program.name);
    if (known != alone_.end()) return known->second;
    return alone_[program.name] = trained_alone(program);
  }

  // Every case is trained on each number of ranks, by one of the engines in a share.
  template <typename Case>
  void expect_in_worlds(const std::vector<Case>& cases, const Train<Case>& train) {
    uint64_t offset = 0;
    for (const Case& of : cases) {
      for (const int num_ranks : share_on_engine<int>({1, 2, 3}, offset++)) {
        expect_one_process(of, num_ranks, train, "no delay");
      }
    }
  }

  // On two ranks, with kernels up to 300 us late.
  template <typename Case>
  void expect_with_delays(const std::vector<Case>& cases, int num_seeds, const Train<Case>& train) {
    uint64_t offset = 0;
    for (const Case& of : cases) {
      for (const uint64_t seed : share_on_engine(test_seeds(num_seeds), offset++)) {
        late::set_delays({.longest = std::chrono::microseconds(300), .seed = seed});
        expect_one_process(of, 2, train, format("seed {}", seed));
      }
    }
  }

 private:
  std::map<std::string, Values> alone_;
};

}  // namespace cadre::testing
