// Compares post-local SGD under DistributedDataParallel with one process that trains a model for
// each subgroup on the rows of all its ranks, and averages these models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/averaging/model_averager.h"
#include "cadre/parallel/comm_hooks/comm_hooks.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/reduction/agreement/trailer.h"
#include "cadre/testing/torch/group_fakes.h"
#include "cadre/testing/torch/rank_expectations.h"

namespace cadre::post_local_sgd {
namespace {

using testing::expect_on_ranks;
using testing::require;
using testing::require_refused;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int64_t kWidth = 5;
constexpr int64_t kNumSteps = 8;
constexpr int64_t kStart = 2;
constexpr int64_t kPeriod = 3;
constexpr double kRate = 0.05;

struct Net : nn::Module {
  Net() {
    first = register_module("first", nn::Linear(kWidth, 7));
    second = register_module("second", nn::Linear(7, 2));
    to(torch::kDouble);
    // The generator of libtorch is shared by the ranks, which are threads.
    const torch::NoGradGuard no_grad;
    for (const Tensor& parameter : parameters()) {
      const Tensor numbers = torch::arange(1, parameter.numel() + 1, torch::kDouble);
      parameter.copy_(torch::sin(numbers.square()).view(parameter.sizes()) * 0.5);
    }
  }
  Tensor forward(const Tensor& x) { return second(torch::tanh(first(x))); }
  nn::Linear first{nullptr}, second{nullptr};
};

// The rows of a rank in a step: 1 to 4, and once none.
int64_t num_rows(int64_t step, int rank) {
  return step == 5 && rank == 1 ? 0 : 1 + (rank + step) % 4;
}

Tensor rows_of(int64_t step, int rank) {
  const Tensor numbers = torch::arange(num_rows(step, rank) * kWidth, torch::kDouble);
  return torch::sin(numbers.square() * 0.3 + static_cast<double>(10 * step + rank))
      .view({-1, kWidth});
}

// The mean over the rows; zero without rows.
Tensor loss_of(const Tensor& output) {
  const Tensor sum = (output.pow(2) + torch::sin(output)).sum();
  return sum / static_cast<double>(std::max<int64_t>(output.size(0), 1));
}

struct Setting {
  int num_ranks;
  int subgroup_size;
};

// Returns the parameters of each subgroup after kNumSteps steps.
std::vector<std::vector<Tensor>> train_in_one_process(const Setting& setting) {
  const int num_groups = setting.num_ranks / setting.subgroup_size;
  std::vector<std::shared_ptr<Net>> nets;
  for (int group = 0; group < num_groups; ++group) nets.push_back(std::make_shared<Net>());
  for (int64_t step = 0; step < kNumSteps; ++step) {
    for (int group = 0; group < num_groups; ++group) {
      std::vector<Tensor> rows;
      for (int rank = 0; rank < setting.num_ranks; ++rank) {
        const bool is_own = rank / setting.subgroup_size == group;
        if (is_own || step < kStart) rows.push_back(rows_of(step, rank));
      }
      auto& net = *nets[static_cast<size_t>(group)];
      net.zero_grad();
      loss_of(net.forward(torch::cat(rows))).backward();
      const torch::NoGradGuard no_grad;
      for (const Tensor& parameter : net.parameters()) parameter.sub_(parameter.grad() * kRate);
    }
    if (step < kStart || (step - kStart) % kPeriod != 0) continue;
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < nets[0]->parameters().size(); ++i) {
      Tensor mean = torch::zeros_like(nets[0]->parameters()[i]);
      for (const auto& net : nets) mean += net->parameters()[i] / num_groups;
      for (const auto& net : nets) net->parameters()[i].copy_(mean);
    }
  }
  std::vector<std::vector<Tensor>> trained;
  for (const auto& net : nets) trained.push_back(net->parameters());
  return trained;
}

comm_hooks::PostLocalSgdOptions options_of(const ProcessGroup& group, int subgroup_size,
                                           int64_t start_step = kStart) {
  return {.subgroup = *group.split({.color = group.rank() / subgroup_size, .name = "local"}),
          .start_step = start_step};
}

DistributedDataParallelOptions with(const comm_hooks::Hook& hook) {
  DistributedDataParallelOptions options;
  options.comm_hook = hook;
  // Several buckets, so that a step is not counted by buckets.
  options.bucket_caps = {.first_bytes = 64, .bytes = 128};
  return options;
}

template <typename Model>
void train_step(Model& model, int64_t step, int rank, bool in_parts) {
  model.zero_grad();
  const Tensor rows = rows_of(step, rank);
  if (in_parts) {
    const std::vector<int64_t> parts = {rows.size(0) / 2, rows.size(0) - rows.size(0) / 2};
    model.backward_in_parts(parts, [&](size_t part) {
      return loss_of(model(rows.narrow(0, part == 0 ? 0 : parts[0], parts[part])));
    });
  } else {
    loss_of(model(rows)).backward();
  }
  const torch::NoGradGuard no_grad;
  for (const Tensor& parameter : model.parameters()) parameter.sub_(parameter.grad() * kRate);
}

TEST(PostLocalSgd, EachSubgroupTrainsAsOneProcessWithItsRows) {
  for (const Setting& setting : {Setting{2, 1}, Setting{3, 1}, Setting{4, 2}, Setting{4, 4}}) {
    const auto expected = train_in_one_process(setting);
    for (const bool in_parts : {false, true}) {
      expect_on_ranks(setting.num_ranks, [&](const ProcessGroup& group) {
        const auto net = std::make_shared<Net>();
        const auto hook = comm_hooks::post_local_sgd(options_of(group, setting.subgroup_size));
        DistributedDataParallel model{net, group, with(hook)};
        ModelAverager averager{
            net, group, {.method = PeriodicAveraging{.period = kPeriod, .warmup_steps = kStart}}};
        for (int64_t step = 0; step < kNumSteps; ++step) {
          train_step(model, step, group.rank(), in_parts);
          averager.step();
        }
        const auto& own = expected[static_cast<size_t>(group.rank() / setting.subgroup_size)];
        for (size_t i = 0; i < own.size(); ++i) {
          const Tensor error = (net->parameters()[i].detach() - own[i].detach()).abs().max();
          require(error.item<double>() < 1e-12,
                  format("parameter {} with {} of {} ranks, in parts {}: error {}", i,
                         setting.subgroup_size, setting.num_ranks, in_parts, error.item<double>()));
        }
      });
    }
  }
}

// Nothing but the trailer and the numbers of samples is sent outside of the subgroup.
TEST(PostLocalSgd, LocalStepsSendNoGradientsToOtherSubgroups) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    testing::FakeGroup counted(group);
    std::atomic<int64_t> num_bytes = 0;
    const auto net = std::make_shared<Net>();
    const auto hook = comm_hooks::post_local_sgd(options_of(counted.group(), 1));
    DistributedDataParallel model{net, counted.group(), with(hook)};
    counted.on_call = [&](testing::GroupCall& call) {
      if (call.is_of_values()) num_bytes += static_cast<int64_t>(call.input.nbytes());
      call.pass_on();
    };
    const int64_t gradients = 8 * num_elements(net->parameters());
    constexpr auto kTrailerBytes = static_cast<int64_t>(reduction::kTrailerNumel * sizeof(float));
    for (int64_t step = 0; step < 4; ++step) {
      num_bytes = 0;
      train_step(model, step, group.rank(), false);
      const int64_t expected = kTrailerBytes + (step < kStart ? gradients : 0);
      require(num_bytes == expected, format("step {}: {} bytes", step, num_bytes.load()));
    }
  });
}

// A hook whose number of steps is not loaded would reduce over all ranks again.
TEST(PostLocalSgd, AResumedRunGivesTheSameBits) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const comm_hooks::PostLocalSgdOptions options = options_of(group, 1);
    const auto steps = [&](auto& model, int64_t from, int64_t to) {
      for (int64_t step = from; step < to; ++step) train_step(model, step, group.rank(), false);
    };
    const auto net = std::make_shared<Net>();
    SavedCommHook saved;
    std::vector<Tensor> values;
    {
      DistributedDataParallel model{net, group, with(comm_hooks::post_local_sgd(options))};
      steps(model, 0, 4);
      saved = model.comm_hook_state();
      for (const Tensor& parameter : net->parameters()) {
        values.push_back(parameter.detach().clone());
      }
      steps(model, 4, 6);
    }
    const auto resumed_with = [&](const SavedCommHook& state) {
      const auto other = std::make_shared<Net>();
      DistributedDataParallel model{other, group, with(comm_hooks::post_local_sgd(options))};
      {
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; i < values.size(); ++i) other->parameters()[i].copy_(values[i]);
      }
      model.load_comm_hook_state(state);
      steps(model, 4, 6);
      bool is_equal = true;
      for (size_t i = 0; i < values.size(); ++i) {
        is_equal &= torch::equal(other->parameters()[i], net->parameters()[i]);
      }
      return is_equal;
    };
    require(resumed_with(saved), "the same bits");
    require(!resumed_with({{"num_steps", torch::zeros({1}, torch::kLong)}}), "the state matters");
    for (const SavedCommHook& bad :
         {SavedCommHook{}, SavedCommHook{{"steps", torch::zeros({1}, torch::kLong)}},
          SavedCommHook{{"num_steps", torch::zeros({2}, torch::kLong)}},
          SavedCommHook{{"num_steps", torch::zeros({1})}}, SavedCommHook{{"num_steps", Tensor()}},
          SavedCommHook{{"num_steps", torch::full({1}, -1, torch::kLong)}}}) {
      require_refused([&] { resumed_with(bad); }, "not one of this hook");
    }
  });
}

TEST(PostLocalSgd, WhatHasNoMeaningIsRefused) {
  expect_on_ranks(4, [](const ProcessGroup& group) {
    const auto net = std::make_shared<Net>();
    const auto wrap = [&](const DistributedDataParallelOptions& options) {
      const DistributedDataParallel model{net, group, options};
    };
    const comm_hooks::PostLocalSgdOptions pairs = options_of(group, 2);
    require_refused(
        [&] { comm_hooks::post_local_sgd({.subgroup = pairs.subgroup, .start_step = -1}); },
        "start_step is -1");
    require_refused(
        [&] {
          wrap(with(comm_hooks::post_local_sgd(
              {.subgroup = pairs.subgroup, .start_step = group.rank() == 3 ? 1 : 2})));
        },
        "start_step 2");
    const auto unequal = group.split({.color = group.rank() == 3 ? 1 : 0, .name = "unequal"});
    require_refused(
        [&] { wrap(with(comm_hooks::post_local_sgd({.subgroup = *unequal, .start_step = 1}))); },
        "subgroups of 3");
    DistributedDataParallelOptions sum =
        with(comm_hooks::fp16_compress_wrapper(comm_hooks::post_local_sgd(pairs)));
    sum.weighting = GradientWeighting::kSum;
    require_refused([&] { wrap(sum); }, "GradientWeighting::kSum needs the sum over all");
    // A wrapper whose group does not contain the subgroup.
    DistributedDataParallel model{
        net, pairs.subgroup,
        with(comm_hooks::post_local_sgd({.subgroup = group, .start_step = 0}))};
    const std::string failure =
        testing::failure_of([&] { loss_of(model(rows_of(0, group.rank()))).backward(); });
    require(
        failure.find("is in the subgroup and not in the group of the wrapper") != std::string::npos,
        failure);
  });
}

}  // namespace
}  // namespace cadre::post_local_sgd
