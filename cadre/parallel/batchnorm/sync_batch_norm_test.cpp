// Compares synchronous batch normalization on several ranks with BatchNorm of libtorch in one
// process, which gets the batches of all ranks as one.
#include "cadre/parallel/batchnorm/sync_batch_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/rank_expectations.h"

namespace cadre {
namespace {

using testing::error_of;
using testing::expect_on_ranks;
using testing::require;
using testing::require_refused;
using testing::run_groups;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int64_t kChannels = 3;
constexpr double kLargestUpstream = 33;  // the largest of values_of()

// Returns values that differ in each element and have another mean and variance in each channel.
Tensor values_of(const std::vector<int64_t>& shape, double seed) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  const Tensor plain = torch::sin(torch::arange(numel, torch::kDouble) * 1.7 + seed).view(shape);
  std::vector<int64_t> of_channels(shape.size(), 1);
  of_channels[1] = shape[1];
  const Tensor channel = torch::arange(1, shape[1] + 1, torch::kDouble).view(of_channels);
  return plain * channel + 10 * channel;
}

template <typename Norm>
void fill(Norm& norm, torch::ScalarType dtype) {
  const torch::NoGradGuard no_grad;
  const auto fill_with = [](const Tensor& tensor, double seed) {
    if (!tensor.defined()) return;
    tensor.copy_(torch::cos(torch::arange(tensor.numel(), torch::kDouble) + seed) + 1.5);
  };
  fill_with(norm.weight, 1);
  fill_with(norm.bias, 2);
  fill_with(norm.running_mean, 3);
  fill_with(norm.running_var, 4);
  norm.to(dtype);
}

// The rows [begin, begin + size) of the whole batch.
struct Share {
  int64_t begin;
  int64_t size;
};

Share share_of(const std::vector<int64_t>& sizes, int rank) {
  Share share{.begin = 0, .size = sizes[static_cast<size_t>(rank)]};
  for (int other = 0; other < rank; ++other) share.begin += sizes[static_cast<size_t>(other)];
  return share;
}

void require_close(const Tensor& actual, const Tensor& expected, double tolerance,
                   const std::string& what) {
  require(actual.defined() == expected.defined(), what + " is defined");
  if (!actual.defined()) return;
  const Tensor a = actual.to(torch::kDouble);
  const Tensor b = expected.to(torch::kDouble);
  require(a.sizes() == b.sizes(), what + " has its shape");
  const double error = a.numel() == 0 ? 0.0 : (a - b).abs().max().item<double>();
  const double scale = b.numel() == 0 ? 1.0 : b.abs().max().item<double>() + 1;
  require(error <= tolerance * scale, format("{} differs by {} of {}", what, error, scale));
}

struct Case {
  std::vector<int64_t> shape;  // the shape of the whole batch
  std::vector<int64_t> sizes;  // the number of rows of each rank
  nn::BatchNormOptions options = nn::BatchNormOptions(kChannels);
  torch::ScalarType dtype = torch::kDouble;
  torch::ScalarType parameter_dtype = torch::kDouble;
  double tolerance = 1e-12;
  bool is_channels_last = false;
};

// Runs three batches, each with forward and backward, on all ranks and in one process, and compares
// outputs, gradients of the input and of the parameters, and running statistics.
template <typename Norm, typename Plain = Norm>
void expect_as_one_process(const Case& how) {
  const auto result =
      run_groups(static_cast<int>(how.sizes.size()), [&](const ProcessGroup& group) {
        Plain whole(how.options);
        Norm norm(how.options);
        // One process computes in float64, from the same rounded values.
        fill(*whole, how.parameter_dtype);
        whole->to(torch::kDouble);
        fill(*norm, how.parameter_dtype);
        convert_sync_batchnorm(*norm, group);
        const Share share = share_of(how.sizes, group.rank());
        for (int step = 0; step < 3; ++step) {
          Tensor x = values_of(how.shape, 0.3 * step).to(how.dtype);
          if (how.is_channels_last) x = x.contiguous(at::MemoryFormat::ChannelsLast);
          const Tensor upstream = values_of(how.shape, 5 + step).to(how.dtype);
          const Tensor x_whole = x.to(torch::kDouble).clone().requires_grad_();
          const Tensor x_own = x.narrow(0, share.begin, share.size).clone().requires_grad_();
          const Tensor y_whole = whole(x_whole);
          const Tensor y = norm(x_own);
          require(y.scalar_type() == how.dtype, "the output has the dtype of the input");
          require(y.suggest_memory_format() == x.suggest_memory_format() || share.size == 0,
                  "the output has the memory format of the input");
          (y_whole * upstream).sum().backward();
          (y * upstream.narrow(0, share.begin, share.size)).sum().backward();
          const auto own = [&](const Tensor& tensor) {
            return tensor.narrow(0, share.begin, share.size);
          };
          require_close(y, own(y_whole), how.tolerance, "the output");
          require_close(x_own.grad(), own(x_whole.grad()), how.tolerance * kLargestUpstream,
                        "the input's gradient");
          for (const auto& parameter : norm->named_parameters()) {
            const Tensor gradient = parameter.value().grad().to(torch::kDouble);
            group.all_reduce(gradient);
            require_close(gradient, whole->named_parameters()[parameter.key()].grad(),
                          how.tolerance * kLargestUpstream, "the gradient of " + parameter.key());
          }
          for (const auto& buffer : norm->named_buffers()) {
            require_close(buffer.value(), whole->named_buffers()[buffer.key()], how.tolerance,
                          buffer.key());
          }
          norm->zero_grad();
          whole->zero_grad();
        }
      });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(SyncBatchNorm, StatisticsAndGradientsAreThoseOfTheWholeBatch) {
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{7}, {4, 3}, {2, 5}, {2, 2, 3}, {5, 0, 2}, {0, 3, 2, 2}}) {
    SCOPED_TRACE(std::to_string(sizes.size()) + " ranks");
    expect_as_one_process<nn::BatchNorm1d>({.shape = {7, kChannels}, .sizes = sizes});
    expect_as_one_process<nn::BatchNorm1d>({.shape = {7, kChannels, 4}, .sizes = sizes});
    expect_as_one_process<nn::BatchNorm2d>({.shape = {7, kChannels, 2, 3}, .sizes = sizes});
    expect_as_one_process<nn::BatchNorm3d>({.shape = {7, kChannels, 2, 1, 2}, .sizes = sizes});
    expect_as_one_process<SyncBatchNorm, nn::BatchNorm1d>(
        {.shape = {7, kChannels, 2}, .sizes = sizes});
  }
}

TEST(SyncBatchNorm, EachOptionHasItsMeaning) {
  const std::vector<int64_t> shape = {7, kChannels, 2, 2};
  const auto expect = [&](const nn::BatchNormOptions& options) {
    expect_as_one_process<nn::BatchNorm2d>({.shape = shape, .sizes = {3, 4}, .options = options});
    expect_as_one_process<SyncBatchNorm, nn::BatchNorm2d>(
        {.shape = shape, .sizes = {3, 4}, .options = options});
  };
  expect(nn::BatchNormOptions(kChannels).momentum(std::nullopt));
  expect(nn::BatchNormOptions(kChannels).momentum(0.3).eps(0.1));
  expect(nn::BatchNormOptions(kChannels).affine(false));
  expect(nn::BatchNormOptions(kChannels).track_running_stats(false));
  expect_as_one_process<SyncBatchNorm, nn::BatchNorm2d>(
      {.shape = shape,
       .sizes = {3, 4},
       .options = nn::BatchNormOptions(kChannels).affine(false).track_running_stats(false)});
}

TEST(SyncBatchNorm, DtypesAndMemoryFormatsAreKept) {
  Case how{.shape = {7, kChannels, 4, 5}, .sizes = {3, 4}};
  how.is_channels_last = true;
  expect_as_one_process<nn::BatchNorm2d>(how);
  how.dtype = how.parameter_dtype = torch::kFloat;
  how.tolerance = 2e-6;
  expect_as_one_process<nn::BatchNorm2d>(how);
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    how.dtype = dtype;
    how.tolerance = dtype == torch::kHalf ? 2e-3 : 1.6e-2;
    how.parameter_dtype = torch::kFloat;  // the dtypes under Autocast
    expect_as_one_process<nn::BatchNorm2d>(how);
    how.parameter_dtype = dtype;
    expect_as_one_process<nn::BatchNorm2d>(how);
  }
}

// The variance of values around 1000 is lost in float32 if it is computed as the mean of the
// squares minus the square of the mean.
TEST(SyncBatchNorm, ALargeMeanLosesNoDigits) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    nn::BatchNorm1d norm(nn::BatchNormOptions(1).momentum(1.0));
    convert_sync_batchnorm(*norm, group);
    const Tensor own = torch::tensor({1000.0 + group.rank(), 1000.5 + group.rank()});
    norm(own.view({2, 1}));
    // The values 1000, 1000.5, 1001, 1001.5.
    require(norm->running_mean.item<float>() == 1000.75F, "the mean");
    require_close(norm->running_var, torch::tensor({1.25 / 3}), 1e-6, "the variance");
  });
}

TEST(SyncBatchNorm, EvaluationIsPlainAndNeedsNoOtherRank) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    nn::BatchNorm2d plain(kChannels);
    nn::BatchNorm2d norm(kChannels);
    nn::BatchNorm2d frozen(nn::BatchNormOptions(kChannels).track_running_stats(false));
    fill(*plain, torch::kDouble);
    fill(*norm, torch::kDouble);
    frozen->to(torch::kDouble);
    convert_sync_batchnorm(*norm, group);
    convert_sync_batchnorm(*frozen, group);
    plain->eval();
    norm->eval();
    frozen->eval();
    if (group.rank() == 1) return;
    const Tensor x = values_of({2, kChannels, 2, 2}, 1);
    require(torch::equal(norm(x), plain(x)), "as plain");
    const Tensor own = frozen(x);
    require_close(own.mean({0, 2, 3}), torch::zeros(kChannels), 1e-9, "the mean of this rank");
  });
}

TEST(SyncBatchNorm, WithoutGradTheStatisticsAreStillThoseOfAllRanks) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    for (const bool is_inference : {false, true}) {
      nn::BatchNorm1d norm(nn::BatchNormOptions(1).momentum(1.0));
      convert_sync_batchnorm(*norm, group);
      const torch::NoGradGuard no_grad;
      std::optional<c10::InferenceMode> inference;
      if (is_inference) inference.emplace();
      const Tensor y = norm(torch::full({3, 1}, static_cast<double>(group.rank()), torch::kFloat));
      require(norm->running_mean.item<float>() == 0.5F, "the mean of both ranks");
      require(!y.requires_grad(), "no graph");
    }
  });
}

// Each of these gives the parameters or buffers other memory, or other tensors.
TEST(SyncBatchNorm, LayersStaySynchronousWhenTheirTensorsChange) {
  const auto expect_synchronous = [](const std::function<void(nn::BatchNorm1d&)>& change) {
    expect_on_ranks(2, [&](const ProcessGroup& group) {
      nn::BatchNorm1d norm(nn::BatchNormOptions(2).momentum(1.0));
      convert_sync_batchnorm(*norm, group);
      change(norm);
      norm(torch::full({3, 2}, static_cast<double>(group.rank()), norm->weight.options()));
      require_close(norm->running_mean, torch::full({2}, 0.5), 1e-12, "the mean of both ranks");
    });
  };
  expect_synchronous([](auto& norm) { norm->to(torch::kDouble); });
  expect_synchronous([](auto& norm) { norm->weight.set_data(torch::ones(2)); });
  expect_synchronous([](auto& norm) { norm->weight = torch::ones(2); });
  expect_synchronous([](auto& norm) { norm->running_mean = torch::zeros(2); });
  expect_synchronous([](auto& norm) {  // the layer is then known by its bias
    norm->weight = torch::ones(2);
    norm->running_mean = torch::zeros(2);
  });
  expect_synchronous([](auto& norm) {
    norm->eval();
    norm->train();
  });
}

TEST(SyncBatchNorm, OneValuePerRankSufficesForTheModuleOfCadre) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    SyncBatchNorm norm(nn::BatchNormOptions(2).momentum(1.0));
    require_refused([&] { norm(torch::ones({1, 2})); }, "convert_sync_batchnorm");
    const auto names = convert_sync_batchnorm(*norm, group);
    require(names.size() == 1, "one layer");
    const Tensor y = norm(torch::full({1, 2}, 1.0 + 2 * group.rank()));
    require_close(norm->running_mean, torch::full({2}, 2.0), 1e-6, "the mean");
    require_close(y, torch::full({1, 2}, group.rank() == 0 ? -1.0 : 1.0), 1e-4, "the output");
    require_refused([&] { norm(torch::ones({group.rank(), 2})); }, "have 1 values");
    require_refused([&] { norm(torch::ones({2})); }, "shape (2)");
  });
}

struct TwoNorms : nn::Module {
  TwoNorms() {
    first = register_module("first", nn::BatchNorm1d(2));
    second = register_module("second", nn::BatchNorm1d(2));
    list = register_module("list", nn::Sequential(nn::Linear(2, 2), nn::BatchNorm1d(2)));
    again = register_module("again", first);
  }
  nn::BatchNorm1d first{nullptr}, second{nullptr}, again{nullptr};
  nn::Sequential list{nullptr};
};

TEST(SyncBatchNorm, ConvertsEachLayerOnceAndKeepsNames) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    TwoNorms net;
    const auto keys = net.named_parameters().keys();
    const auto buffers = net.named_buffers().keys();
    const std::vector<std::string> names = convert_sync_batchnorm(net, group);
    require(names == std::vector<std::string>({"first", "second", "list.1"}), "the names");
    require(net.named_parameters().keys() == keys, "the parameters");
    require(net.named_buffers().keys() == buffers, "the buffers");
    require_refused([&] { convert_sync_batchnorm(net, group); },
                    "\"first\" is synchronous already");
    nn::Linear none(2, 2);
    require(convert_sync_batchnorm(*none, group).empty(), "no layer");
    // A copy would not be synchronous.
    require(!testing::failure_of([&] { (void)net.first->clone(); }).empty(), "no clone");
  });
}

TEST(SyncBatchNorm, RefusesOnAllRanksWhatItCannotConvert) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const auto none = nn::BatchNormOptions(2).affine(false).track_running_stats(false);
    nn::Sequential net{nn::BatchNorm1d(group.rank() == 0 ? none : nn::BatchNormOptions(2))};
    require_refused([&] { convert_sync_batchnorm(*net, group); }, "has neither a weight nor");
    nn::BatchNorm1d other(2 + group.rank());
    require_refused([&] { convert_sync_batchnorm(*other, group); }, "num_features 2");
    nn::BatchNorm1d norm(2);
    convert_sync_batchnorm(*norm, group);
    norm(torch::randn({3, 2}));
  });
}

TEST(SyncBatchNorm, RanksThatRunOtherLayersGetAnError) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    TwoNorms net;
    convert_sync_batchnorm(net, group);
    const Tensor x = torch::randn({3, 2});
    require_refused([&] { (group.rank() == 0 ? net.first : net.second)(x); },
                    "rank 0 in \"first\", rank 1 in \"second\"");
    const Tensor differentiated = torch::randn({3, 2}, torch::requires_grad(group.rank() == 1));
    require_refused([&] { net.first(differentiated); }, "needs a gradient on rank 1 and none on");
    const Tensor input = torch::randn({3, 2}, torch::requires_grad());
    const Tensor first = net.first(input);
    const Tensor second = net.second(input);
    require_refused([&] { (group.rank() == 0 ? first : second).pow(2).sum().backward(); },
                    "backward of different layers");
    net.first(input).pow(2).sum().backward();
  });
}

TEST(SyncBatchNorm, AnErrorOfOneRankIsAnErrorOfAll) {
  expect_on_ranks(3, [](const ProcessGroup& group) {
    nn::BatchNorm1d norm(2);
    convert_sync_batchnorm(*norm, group);
    const Tensor before = norm->running_mean.clone();
    const auto run_bad = [&] { norm(torch::randn({3, group.rank() == 1 ? 4 : 2})); };
    if (group.rank() == 1) {
      require_refused(run_bad, "the input has shape (3, 4)");
    } else {
      const std::string message = error_of(run_bad, ErrorCode::kAborted);
      require(message.find("rank 1 has thrown in the forward") != std::string::npos, message);
    }
    require(torch::equal(norm->running_mean, before), "the running statistics are unchanged");
    const Tensor x = torch::randn({3, 2}, torch::requires_grad());
    const Tensor y = norm(x);
    const Tensor loss = y.pow(3).sum();
    const auto backward = [&] {
      loss.backward({}, /*retain_graph=*/true, /*create_graph=*/group.rank() == 2);
    };
    if (group.rank() == 2) {
      require_refused(backward, "no second derivative");
    } else {
      const std::string message = error_of(backward, ErrorCode::kAborted);
      require(message.find("rank 2 has thrown in the backward") != std::string::npos, message);
    }
    norm(x).pow(2).sum().backward();
  });
}

// The rank that does not come is named by the group's error.
TEST(SyncBatchNorm, ARankThatDoesNotComeIsNamed) {
  const auto result = run_groups(
      2,
      [](const ProcessGroup& group) {
        nn::BatchNorm1d norm(2);
        convert_sync_batchnorm(*norm, group);
        if (group.rank() == 1) throw std::runtime_error("the forward of rank 1 has failed");
        const std::string message = testing::failure_of([&] { norm(torch::randn({3, 2})); });
        require(message.find("rank 1") != std::string::npos, message);
        require(message.find("synchronous batch normalization") != std::string::npos, message);
        throw std::runtime_error("as expected");
      },
      {.timeout = std::chrono::seconds(5)});
  EXPECT_THAT(result.failures(), ::testing::HasSubstr("as expected"));
}

}  // namespace
}  // namespace cadre
