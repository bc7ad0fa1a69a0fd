// Compares the communication hooks of DistributedDataParallel with one process and with formulas.
#include "cadre/parallel/comm_hooks/comm_hooks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/reduction/agreement/trailer.h"
#include "cadre/testing/torch/fsdp_models.h"
#include "cadre/testing/torch/group_fakes.h"
#include "cadre/testing/torch/rank_expectations.h"

namespace cadre {
namespace {

using testing::error_of;
using testing::expect_on_ranks;
using testing::require;
using testing::require_refused;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int64_t kRows = 7;
constexpr int64_t kInputs = 12;

struct Mlp : nn::Module {
  explicit Mlp(torch::ScalarType dtype = torch::kDouble) {
    first = register_module("first", nn::Linear(kInputs, 16));
    second = register_module("second", nn::Linear(16, 3));
    to(dtype);
    testing::set_values(*this);
  }
  Tensor forward(const Tensor& x) { return second(torch::tanh(first(x))); }
  nn::Linear first{nullptr}, second{nullptr};
};

Tensor batch_of(int step) {
  // The sines of squares are linearly independent rows.
  return torch::sin(torch::arange(kRows * kInputs, torch::kDouble).square() * 0.7 + step)
      .view({kRows, kInputs});
}

Tensor loss_of(const Tensor& output) {
  return (output.pow(2) + torch::sin(output)).mean();
}

// Three ranks have 1, 2 and 4 rows; two ranks have 3 and 4.
Tensor rows_of(int step, const ProcessGroup& group) {
  const std::vector<int64_t> ends =
      group.world_size() == 3 ? std::vector<int64_t>{0, 1, 3, 7} : std::vector<int64_t>{0, 3, 7};
  const auto rank = static_cast<size_t>(group.rank());
  return batch_of(step).narrow(0, ends[rank], ends[rank + 1] - ends[rank]);
}

std::vector<Tensor> copies(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> result;
  for (const Tensor& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

std::vector<Tensor> gradients_of(const nn::Module& net) {
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : net.parameters()) gradients.push_back(parameter.grad());
  return copies(gradients);
}

// The gradients of one process in the first step.
std::vector<Tensor> whole_gradients(torch::ScalarType dtype) {
  Mlp net(dtype);
  loss_of(net.forward(batch_of(0).to(dtype))).backward();
  return gradients_of(net);
}

double error_between(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double error = 0;
  double scale = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error = std::max(error, (a[i] - b[i]).abs().max().item<double>());
    scale = std::max(scale, b[i].abs().max().item<double>());
  }
  return error / scale;
}

DistributedDataParallelOptions with(const comm_hooks::Hook& hook) {
  DistributedDataParallelOptions options;
  options.comm_hook = hook;
  // Several buckets, so that hooks are called during the backward.
  options.bucket_caps = {.first_bytes = 64, .bytes = 512};
  return options;
}

void expect_error_between(const comm_hooks::Hook& hook, double least, double most,
                          torch::ScalarType dtype = torch::kDouble) {
  const std::vector<Tensor> expected = whole_gradients(dtype);
  for (const int num_ranks : {2, 3}) {
    expect_on_ranks(num_ranks, [&](const ProcessGroup& group) {
      const auto net = std::make_shared<Mlp>(dtype);
      DistributedDataParallel model{net, group, with(hook)};
      for (int i = 0; i < 2; ++i) {  // the second time with the learned buckets
        model.zero_grad();
        loss_of(model(rows_of(0, group).to(dtype))).backward();
        const double error = error_between(gradients_of(*net), expected);
        require(error >= least && error <= most, format("{}: error {}", hook->name(), error));
      }
    });
  }
}

// Shares differ in size, so the gradients of a rank must be weighted before the hook sums them.
TEST(CommHooks, EachHookSumsWeightedGradients) {
  expect_error_between(comm_hooks::allreduce(), 0, 1e-14);
  expect_error_between(comm_hooks::fp16_compress(), 1e-7, 1e-3, torch::kFloat);
  expect_error_between(comm_hooks::bf16_compress(), 1e-4, 8e-3, torch::kFloat);
  expect_error_between(comm_hooks::quantize_per_tensor(), 1e-4, 1e-2, torch::kFloat);
  expect_error_between(comm_hooks::bf16_compress_wrapper(comm_hooks::quantize_per_tensor()), 1e-4,
                       2e-2, torch::kFloat);
}

// The scale of 8 bits follows the gradients, however small they are, and a bucket without elements
// is no error.
TEST(CommHooks, QuantizedGradientsMayBeSmallOrNone) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const auto gradient_of = [&](double scale) {
      const auto net = std::make_shared<Mlp>(torch::kFloat);
      const Tensor none = net->register_parameter("none", torch::zeros({0}, torch::kDouble));
      DistributedDataParallel model{net, group, with(comm_hooks::quantize_per_tensor())};
      (loss_of(model(rows_of(0, group).to(torch::kFloat))) * scale + none.sum()).backward();
      return gradients_of(*net);
    };
    const std::vector<Tensor> expected = gradient_of(1);
    const std::vector<Tensor> small = gradient_of(1e-12);
    for (size_t i = 0; i < expected.size(); ++i) {
      const Tensor scaled = small[i] * 1e12;
      require(torch::allclose(scaled, expected[i], 1e-3, 1e-6), format("gradient {}", i));
    }
  });
}

TEST(CommHooks, EqualWeightsAndSumsAreKept) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const auto gradient_with = [&](GradientWeighting weighting) {
      nn::Linear net(nn::LinearOptions(1, 1).bias(false));
      DistributedDataParallelOptions options = with(comm_hooks::allreduce());
      options.weighting = weighting;
      DistributedDataParallel model{net, group, options};
      model(torch::full({1 + group.rank(), 1}, 1.0 + group.rank())).mean().backward();
      return net->weight.grad().item<float>();
    };
    require(gradient_with(GradientWeighting::kEqual) == 1.5F, "the mean of the ranks");
    require(gradient_with(GradientWeighting::kSum) == 3.0F, "the sum");
  });
}

// A hook of the program sees each bucket once, in order, with views of its buffer.
TEST(CommHooks, ACustomHookGetsTheBuckets) {
  const std::vector<Tensor> expected = whole_gradients(torch::kDouble);
  expect_on_ranks(3, [&](const ProcessGroup& group) {
    std::vector<size_t> indices;
    int num_last = 0;
    const auto hook =
        comm_hooks::custom("mine", [&](const GradBucket& bucket, const ProcessGroup& ranks) {
          indices.push_back(bucket.index);
          num_last += bucket.is_last ? 1 : 0;
          int64_t numel = 0;
          for (size_t i = 0; i < bucket.gradients.size(); ++i) {
            require(bucket.gradients[i].sizes() == bucket.parameters[i].sizes(), "shapes");
            require(bucket.gradients[i].is_alias_of(bucket.buffer), "views");
            numel += bucket.gradients[i].numel();
          }
          require(numel == bucket.buffer.numel(), "nothing else is in the buffer");
          const auto work = std::make_shared<Work>(ranks.all_reduce_async(bucket.buffer));
          return [work] { work->wait(); };
        });
    const auto net = std::make_shared<Mlp>();
    DistributedDataParallel model{net, group, with(hook)};
    loss_of(model(rows_of(0, group))).backward();
    require(indices.size() > 1 && num_last == 1, "the buckets of one step");
    for (size_t i = 0; i < indices.size(); ++i) require(indices[i] == i, "their order");
    require(error_between(gradients_of(*net), expected) < 1e-14, "the gradients");
  });
}

TEST(CommHooks, AHookThatThrowsOnOneRankEndsTheStepOnAll) {
  for (const bool in_start : {true, false}) {
    expect_on_ranks(3, [&](const ProcessGroup& group) {
      const auto hook =
          comm_hooks::custom("bad", [&](const GradBucket& bucket, const ProcessGroup& ranks) {
            const bool is_bad = ranks.rank() == 1 && bucket.index == 1;
            if (is_bad && in_start) throw std::runtime_error("no memory");
            const auto work = std::make_shared<Work>(ranks.all_reduce_async(bucket.buffer));
            return [work, is_bad] {
              if (is_bad) throw std::runtime_error("no memory");
              work->wait();
            };
          });
      const auto net = std::make_shared<Mlp>();
      DistributedDataParallel model{net, group, with(hook)};
      const std::string failure =
          testing::failure_of([&] { loss_of(model(rows_of(0, group))).backward(); });
      require(failure.find("no memory") != std::string::npos, failure);
      if (group.rank() != 1) {
        require(failure.find("hook bad has thrown on rank 1") != std::string::npos, failure);
      }
    });
  }
}

TEST(CommHooks, RanksWithOtherHooksAndOptionsWithoutMeaningAreRefused) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const auto net = std::make_shared<Mlp>();
    const auto wrap = [&](const comm_hooks::Hook& hook) {
      const DistributedDataParallel model{net, group, with(hook)};
    };
    require_refused(
        [&] { wrap(group.rank() == 0 ? comm_hooks::allreduce() : comm_hooks::bf16_compress()); },
        "comm_hook is");
    require_refused([&] { wrap(group.rank() == 0 ? nullptr : comm_hooks::allreduce()); }, "none");
    require_refused(
        [&] {
          DistributedDataParallelOptions options = with(comm_hooks::allreduce());
          options.gradients = GradientPlacement::kSharded;
          const DistributedDataParallel model{net, group, options};
        },
        "reduces whole gradients");
  });
  require_refused([] { comm_hooks::fp16_compress_wrapper(nullptr); }, "inner hook is null");
  require_refused([] { comm_hooks::custom("", {}); }, "a name and a function");
}

// The hook inside of a wrapper gets the gradients of the parameters, too, in 16 bits.
TEST(CommHooks, AWrapperGivesItsHookTheGradientsIn16Bits) {
  expect_on_ranks(2, [&](const ProcessGroup& group) {
    const auto hook =
        comm_hooks::custom("inner", [&](const GradBucket& bucket, const ProcessGroup& ranks) {
          require(bucket.buffer.scalar_type() == torch::kHalf, "16 bits");
          std::vector<Tensor> flat;
          for (const Tensor& gradient : bucket.gradients) flat.push_back(gradient.reshape({-1}));
          require(torch::equal(torch::cat(flat), bucket.buffer), "the gradients are its parts");
          const auto work = std::make_shared<Work>(ranks.all_reduce_async(bucket.buffer));
          return [work] { work->wait(); };
        });
    const auto net = std::make_shared<Mlp>();
    DistributedDataParallelOptions options = with(comm_hooks::fp16_compress_wrapper(hook));
    options.bucket_caps = {.first_bytes = 1 << 20, .bytes = 1 << 20};
    DistributedDataParallel model{net, group, options};
    loss_of(model(rows_of(0, group))).backward();
  });
}

// A float16 bucket loses digits in bfloat16, and saves no bytes.
TEST(CommHooks, BucketsOf16BitsStayAsTheyAre) {
  expect_on_ranks(2, [&](const ProcessGroup& group) {
    const auto gradient_with = [&](const comm_hooks::Hook& hook) {
      nn::Linear net(nn::LinearOptions(1, 1).bias(false));
      net->to(torch::kHalf);
      DistributedDataParallel model{net, group, with(hook)};
      model(torch::full({1, 1}, 1.0 + 1.0 / 512, torch::kHalf)).sum().backward();
      return net->weight.grad().item<float>();
    };
    require(gradient_with(comm_hooks::bf16_compress()) == 1.0F + 1.0F / 512, "all digits");
  });
}

// Returns the bytes of gradients that this rank gives to collectives in one backward, after the
// first two.
int64_t bytes_sent(const ProcessGroup& world, const comm_hooks::Hook& hook) {
  testing::FakeGroup counted(world);
  std::atomic<int64_t> num_bytes = 0;
  counted.on_call = [&](testing::GroupCall& call) {
    // The 64-bit integers are numbers of samples, which the ranks exchange in any case.
    if (call.input.scalar_type() != torch::kLong) {
      num_bytes += static_cast<int64_t>(call.input.nbytes());
    }
    call.pass_on();
  };
  const auto net = std::make_shared<Mlp>(torch::kFloat);
  DistributedDataParallelOptions options = with(hook);
  options.bucket_caps = {.first_bytes = 1 << 20, .bytes = 1 << 20};
  options.broadcast_buffers = false;
  DistributedDataParallel model{net, counted.group(), options};
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    num_bytes = 0;
    loss_of(model(rows_of(step, world).to(torch::kFloat))).backward();
  }
  return num_bytes - static_cast<int64_t>(reduction::kTrailerNumel * sizeof(float));
}

TEST(CommHooks, TheBytesSentAreThoseOfTheirFormulas) {
  constexpr int64_t kNumel = kInputs * 16 + 16 + 16 * 3 + 3;
  expect_on_ranks(2, [&](const ProcessGroup& group) {
    const auto expect = [&](const comm_hooks::Hook& hook, int64_t expected) {
      const int64_t sent = bytes_sent(group, hook);
      require(sent == expected,
              format("{}: {} bytes, not {}", hook ? hook->name() : "none", sent, expected));
    };
    expect(nullptr, 4 * kNumel);
    expect(comm_hooks::allreduce(), 4 * kNumel);
    expect(comm_hooks::bf16_compress(), 2 * kNumel);
    expect(comm_hooks::fp16_compress(), 2 * kNumel);
    expect(comm_hooks::quantize_per_tensor(), kNumel + 16);
  });
}

// A hook of a program that keeps something between steps: it adds to each bucket a half of what it
// has added before, so that what it has kept shows in the gradients.
class Remembering final : public CommHook::State {
 public:
  FinishReduction start(const GradBucket& bucket, const ProcessGroup& group) override {
    kept_ = kept_ / 2 + 1;
    const auto work = std::make_shared<Work>(group.all_reduce_async(bucket.buffer));
    return [work, buffer = bucket.buffer, added = kept_.clone()] {
      work->wait();
      buffer.add_(added);
    };
  }
  SavedCommHook saved() const override { return {{"kept", kept_}}; }
  void load(const SavedCommHook& saved) override {
    if (saved.size() != 1 || saved[0].first != "kept") CommHook::State::load(saved);
    kept_ = saved[0].second.clone();
  }

 private:
  Tensor kept_ = torch::zeros({1}, torch::kDouble);
};

// A resumed run gives the same bits if the hook's state is loaded, and others if it is not.
TEST(CommHooks, AHookContinuesFromWhatWasSaved) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const auto hook = std::make_shared<const CommHook>(
        "remembering", [] { return std::make_unique<Remembering>(); });
    DistributedDataParallelOptions options = with(hook);
    options.bucket_caps = {.first_bytes = 1 << 20, .bytes = 1 << 20};
    const auto net = std::make_shared<Mlp>();
    const auto step_of = [&](auto& model, int step) {
      model.zero_grad();
      loss_of(model(rows_of(step, group))).backward();
      return gradients_of(*model.module());
    };
    SavedCommHook saved;
    std::vector<Tensor> expected;
    {
      DistributedDataParallel model{net, group, options};
      for (int step = 0; step < 4; ++step) step_of(model, step);
      for (const auto& [name, tensor] : model.comm_hook_state()) {
        saved.emplace_back(name, tensor.clone());
      }
      options.layout = model.learned_layout();
      expected = step_of(model, 4);
    }
    DistributedDataParallel resumed{net, group, options};
    require_refused([&] { resumed.load_comm_hook_state({{"another", torch::ones(1)}}); }, "");
    resumed.load_comm_hook_state(saved);
    require(error_between(step_of(resumed, 4), expected) == 0, "the same bits");
    resumed.load_comm_hook_state({{"kept", torch::zeros({1}, torch::kDouble)}});
    require(error_between(step_of(resumed, 4), expected) > 1e-6, "what was kept matters");
  });
}

}  // namespace
}  // namespace cadre
