#include "cadre/parallel/layers/counter_based_dropout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/layers/philox.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using torch::Tensor;

constexpr DropoutStream kStream{.seed = 7, .step = 3, .first_sample = 5};
constexpr uint64_t kLayer = 11;

Tensor kept(const Tensor& shape_of, const DropoutStream& stream, uint64_t layer, double p = 0.4) {
  return counter_based_dropout(torch::ones_like(shape_of), p, stream, layer).ne(0);
}

// The test computes the mask of an input (B, R, D) from the generator by definition, without the
// loops of the function under test.
TEST(CounterBasedDropout, TheMaskIsTheGeneratorsAtEachElement) {
  constexpr double kP = 0.4;
  const Tensor output =
      counter_based_dropout(torch::ones({2, 3, 10}, torch::kDouble), kP, kStream, kLayer);
  const PhiloxCounter key = philox4x32({3, 0, 11, 0}, {7, 0});
  for (uint32_t sample = 0; sample < 2; ++sample) {
    for (uint32_t row = 0; row < 3; ++row) {
      for (uint32_t i = 0; i < 10; ++i) {
        const uint32_t word = philox4x32({i / 4, row, 5 + sample, 0}, {key[0], key[1]}).at(i % 4);
        const double expected = word < kP * 0x1p32 ? 0 : 1 / (1 - kP);
        EXPECT_EQ(output.index({int64_t{sample}, int64_t{row}, int64_t{i}}).item<double>(),
                  expected);
      }
    }
  }
}

TEST(CounterBasedDropout, ARankMayHaveEverySecondRow) {
  const Tensor whole = kept(torch::zeros({6, 5}), kStream, kLayer);
  DropoutStream odd = kStream;
  odd.first_sample += 1;
  odd.sample_stride = 2;
  const Tensor own = kept(torch::zeros({3, 5}), odd, kLayer);
  EXPECT_TRUE(own.equal(whole.slice(0, 1, 6, 2)));
}

TEST(CounterBasedDropout, DropsTheShareOfElementsAndKeepsTheMean) {
  const Tensor x = torch::ones({50, 40, 50}, torch::kDouble);
  for (const double p : {0.1, 0.5, 0.9}) {
    const Tensor y = counter_based_dropout(x, p, kStream, kLayer);
    EXPECT_NEAR(y.eq(0).to(torch::kDouble).mean().item<double>(), p, 5e-3);
    EXPECT_NEAR(y.max().item<double>(), 1 / (1 - p), 1e-15);
  }
}

TEST(CounterBasedDropout, ZeroKeepsAllAndOneDropsAll) {
  const Tensor x = torch::full({3, 4}, std::numeric_limits<double>::infinity(), torch::kDouble);
  EXPECT_TRUE(torch::equal(counter_based_dropout(x, 0, kStream, kLayer), x));
  EXPECT_TRUE(torch::equal(counter_based_dropout(x, 1, kStream, kLayer), torch::zeros_like(x)));
}

TEST(CounterBasedDropout, EverythingThatAMaskDependsOnChangesIt) {
  const Tensor x = torch::ones({4, 100});
  const Tensor mask = kept(x, kStream, kLayer);
  EXPECT_TRUE(torch::equal(mask, kept(x, kStream, kLayer)));
  EXPECT_TRUE(torch::equal(mask, kept(x.to(torch::kDouble), kStream, kLayer)));
  EXPECT_TRUE(torch::equal(mask, kept(x.to(torch::kBFloat16), kStream, kLayer)));
  constexpr uint64_t kHigh = uint64_t{1} << 40;
  for (const DropoutStream other :
       {DropoutStream{8, 3, 5}, DropoutStream{7, 4, 5}, DropoutStream{7 + kHigh, 3, 5},
        DropoutStream{7, 3 + kHigh, 5}, DropoutStream{7, 3, 9}, DropoutStream{7, 3, 5 + kHigh}}) {
    const double equal_share =
        mask.eq(kept(x, other, kLayer)).to(torch::kDouble).mean().item<double>();
    EXPECT_NEAR(equal_share, 0.4 * 0.4 + 0.6 * 0.6, 0.12);
  }
  EXPECT_FALSE(torch::equal(mask, kept(x, kStream, kLayer + 1)));
  EXPECT_FALSE(torch::equal(mask, kept(x, kStream, kLayer + kHigh)));
  EXPECT_FALSE(torch::equal(mask[0], mask[1]));
}

// The tensor is cut along each dimension, at indices that are not multiples of the four elements
// that share a counter.
TEST(CounterBasedDropout, APartHasTheMaskOfTheWhole) {
  const Tensor whole = torch::rand({4, 3, 6, 11});
  const Tensor expected = counter_based_dropout(whole, 0.4, kStream, kLayer);
  const std::vector<int64_t> sizes = {3, 6, 11};
  for (int64_t dim = 1; dim < 4; ++dim) {
    for (int64_t begin = 0; begin < whole.size(dim); ++begin) {
      const int64_t size = std::min<int64_t>(whole.size(dim) - begin, 5);
      DropoutRegion region{.sizes = sizes, .offsets = {0, 0, 0}};
      region.offsets[static_cast<size_t>(dim - 1)] = begin;
      const Tensor part =
          counter_based_dropout(whole.narrow(dim, begin, size), 0.4, kStream, kLayer, region);
      EXPECT_TRUE(torch::equal(part, expected.narrow(dim, begin, size))) << dim << " " << begin;
    }
  }
  DropoutStream later = kStream;
  later.first_sample += 3;
  EXPECT_TRUE(torch::equal(counter_based_dropout(whole.narrow(0, 3, 1), 0.4, later, kLayer),
                           expected.narrow(0, 3, 1)));
}

TEST(CounterBasedDropout, TheBackwardHasTheMaskOfItsForward) {
  DropoutStream stream = kStream;
  const Tensor x = torch::rand({3, 5, 7}, torch::kDouble).requires_grad_(true);
  const Tensor y = counter_based_dropout(x, 0.4, stream, kLayer);
  ++stream.step;
  const Tensor v = torch::rand_like(y).requires_grad_(true);
  const Tensor gradient = torch::autograd::grad({y}, {x}, {v}, true, /*create_graph=*/true)[0];
  EXPECT_TRUE(torch::equal(gradient, counter_based_dropout(v, 0.4, kStream, kLayer)));
  const Tensor second = torch::autograd::grad({gradient.sum()}, {v})[0];
  EXPECT_TRUE(
      torch::equal(second, counter_based_dropout(torch::ones_like(v), 0.4, kStream, kLayer)));
}

TEST(CounterBasedDropout, AModuleIsTheIdentityInEvaluation) {
  const auto stream = std::make_shared<DropoutStream>(kStream);
  CounterBasedDropout dropout(
      CounterBasedDropoutOptions{.p = 0.4, .layer = kLayer, .stream = stream});
  const Tensor x = torch::rand({2, 9});
  EXPECT_TRUE(torch::equal(dropout(x), counter_based_dropout(x, 0.4, kStream, kLayer)));
  ++stream->step;
  EXPECT_FALSE(torch::equal(dropout(x), counter_based_dropout(x, 0.4, kStream, kLayer)));
  dropout->eval();
  EXPECT_TRUE(torch::equal(dropout(x), x));
}

TEST(CounterBasedDropout, RefusesWhatHasNoMask) {
  const Tensor x = torch::rand({2, 9});
  const auto refused = [](const auto& call) { return error_of(call, ErrorCode::kInvalidArgument); };
  EXPECT_THAT(refused([&] { counter_based_dropout(x, 1.5, kStream, 0); }),
              HasSubstr("the probability 1.5 is not between 0 and 1"));
  EXPECT_THAT(
      refused([&] { counter_based_dropout(x, 0.5, kStream, 0, {.sizes = {10}, .offsets = {2}}); }),
      HasSubstr("the input (2, 9) does not fit into a tensor whose samples have the sizes (10) at "
                "the offsets (2)"));
  EXPECT_THAT(refused([&] { counter_based_dropout(x.to(torch::kLong), 0.5, kStream, 0); }),
              HasSubstr("floating-point tensor with values"));
  EXPECT_THAT(refused([&] { CounterBasedDropout(CounterBasedDropoutOptions{.layer = 0}); }),
              HasSubstr("options.stream is null"));
}

// If the input is a rank's part of the features and the style is not kColwise, the dropout would
// use the mask of other features, so it throws.
TEST(CounterBasedDropout, RefusesAPartOfItsFeaturesUnlessColumnParallel) {
  const CounterBasedDropoutOptions options{
      .layer = kLayer, .stream = std::make_shared<DropoutStream>(kStream), .features = 8};
  CounterBasedDropout plain(options);
  EXPECT_EQ(plain(torch::ones({2, 3, 8})).size(-1), 8);
  EXPECT_EQ(
      error_of(
          [&] {
            plain(torch::ones({2, 3, 4}));
          },
          ErrorCode::kInvalidArgument),
      "counter_based_dropout: the input (2, 3, 4) does not have the 8 features of "
      "options.features; a layer whose input is this rank's part of the features must be kColwise");
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group) {
    for (const auto style : {ParallelStyle::kReplicated, ParallelStyle::kSequence}) {
      CounterBasedDropout dropout(options);
      layers::parallelize_new(*dropout, {.group = group, .style = style}, "dropout");
      dropout(torch::ones({2, 3, 8}));
      const std::string message = error_of(
          [&] {
            dropout(torch::ones({2, 3, 4}));
          },
          ErrorCode::kInvalidArgument);
      testing::require(message.find("does not have the 8 features") != std::string::npos, message);
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Only prints times: a speed that is measured on a busy machine cannot be a pass criterion.
TEST(CounterBasedDropout, TimeBesideLibtorch) {
  at::set_num_threads(1);
  const Tensor x = torch::rand({64, 128, 128});
  const auto best_ms = [](const auto& run) {
    double best = 1e9;
    for (int i = 0; i < 10; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      run();
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - begin;
      best = std::min(best, took.count());
    }
    return best;
  };
  std::cout << "dropout of 2^20 float32 on 1 thread: "
            << best_ms([&] { counter_based_dropout(x, 0.1, kStream, kLayer); })
            << " ms; torch::dropout " << best_ms([&] { torch::dropout(x, 0.1, true); }) << " ms\n";
}

}  // namespace
}  // namespace cadre
