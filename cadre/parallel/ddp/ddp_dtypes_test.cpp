// Tests a model whose parameters have different dtypes. Each bucket has one dtype, and the
// gradients must be the mean of those that plain autograd computes on each rank.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::require;
using testing::run_groups;
using torch::Tensor;

constexpr int kDtypeWorld = 3;
constexpr int64_t kWidth = 33;  // odd, so that the gradients in a bucket are not aligned

struct Type {
  const char* name;
  torch::ScalarType dtype;
  double epsilon;   // the distance from 1 to the next number
  double smallest;  // the smallest positive number
};

const std::vector<Type> kTypes = {
    {"float32", torch::kFloat, std::ldexp(1.0, -23), std::ldexp(1.0, -149)},
    {"bfloat16", torch::kBFloat16, std::ldexp(1.0, -7), std::ldexp(1.0, -133)},
    {"float64", torch::kDouble, std::ldexp(1.0, -52), std::ldexp(1.0, -1074)},
    {"float16", torch::kHalf, std::ldexp(1.0, -10), std::ldexp(1.0, -24)}};

// A module with parameters a and b of each dtype. forward() returns the sum of tanh(x * a) * b over
// the dtypes, beginning with kTypes[first].
struct Mixed : torch::nn::Module {
  Mixed() {
    for (const Type& type : kTypes) {
      for (auto* list : {&a, &b}) {
        const Tensor values = torch::linspace(-1, 1 + 0.1 * static_cast<double>(list->size()),
                                              kWidth, torch::kDouble);
        list->push_back(register_parameter(std::string(list == &a ? "a_" : "b_") + type.name,
                                           values.to(type.dtype)));
      }
    }
  }
  // left_out: the index in kTypes of a dtype that is not used, or kNone.
  Tensor forward(const Tensor& x, size_t first, size_t left_out) {
    Tensor sum = torch::zeros({}, torch::kDouble);
    for (size_t k = 0; k < kTypes.size(); ++k) {
      const size_t i = (first + k) % kTypes.size();
      if (i == left_out) continue;
      const Tensor y = torch::tanh(x.to(kTypes[i].dtype) * a[i]) * b[i];
      sum = sum + y.to(torch::kDouble).pow(2).mean(0).sum();
    }
    return sum;
  }
  std::vector<Tensor> a, b;
};

constexpr size_t kNone = ~size_t{0};

Tensor rows_of(int rank) {
  return torch::sin(torch::arange((rank + 2) * kWidth, torch::kDouble) + rank)
      .view({rank + 2, kWidth});
}

size_t left_out_on(int rank, size_t first) {
  return rank == 1 ? (first + 1) % kTypes.size() : kNone;
}

// The expected gradient of one parameter, in float64.
struct Expected {
  Tensor mean;  // mean of all ranks' gradients, each computed in the parameter's dtype
  // The sum of the absolute values of the terms, from which the error bound is computed.
  Tensor absolute;
};

std::vector<Expected> expected_gradients(size_t first, GradientWeighting weighting) {
  std::vector<Expected> result(2 * kTypes.size());
  double num_rows = 0;
  for (int rank = 0; rank < kDtypeWorld; ++rank)
    num_rows += static_cast<double>(rows_of(rank).size(0));
  for (int rank = 0; rank < kDtypeWorld; ++rank) {
    Mixed module;
    module.forward(rows_of(rank), first, left_out_on(rank, first)).backward();
    const double weight = weighting == GradientWeighting::kSum ? 1
                          : weighting == GradientWeighting::kEqual
                              ? 1.0 / kDtypeWorld
                              : static_cast<double>(rows_of(rank).size(0)) / num_rows;
    for (size_t i = 0; i < result.size(); ++i) {
      const Tensor& gradient = module.parameters()[i].grad();
      if (!gradient.defined()) continue;
      const Tensor part = gradient.to(torch::kDouble) * weight;
      Expected& expected = result[i];
      expected.mean = expected.mean.defined() ? expected.mean + part : part;
      expected.absolute = expected.absolute.defined() ? expected.absolute + part.abs() : part.abs();
    }
  }
  return result;
}

void check_mean(const Tensor& parameter, const Expected& expected, const std::string& where) {
  const Tensor& gradient = parameter.grad();
  require(gradient.defined() && gradient.scalar_type() == parameter.scalar_type(), where);
  const auto type = std::find_if(kTypes.begin(), kTypes.end(), [&](const Type& candidate) {
    return candidate.dtype == parameter.scalar_type();
  });
  // The weighted gradient of each rank, each partial sum and the mean are rounded. Each rounding
  // changes a value by at most half an epsilon, relatively, or half of the smallest number.
  const Tensor bound =
      (expected.absolute * type->epsilon + type->smallest) * ((kDtypeWorld + 1) / 2.0);
  const Tensor difference = (gradient.to(torch::kDouble) - expected.mean).abs();
  require((difference <= bound).all().item<bool>(),
          format("{}: differs by {}", where, difference.max().item<double>()));
}

class DdpDTypes : public ::testing::TestWithParam<GradientWeighting> {};

TEST_P(DdpDTypes, OfOneModelAreReducedRightlyInBucketsOfTheirOwn) {
  // Each dtype is once the first in the forward. Its gradients then become ready last, so its
  // bucket is the last one. The ranks' flags (the trailer) are reduced with that bucket, in its
  // dtype.
  for (size_t first = 0; first < kTypes.size(); ++first) {
    const std::vector<Expected> expected = expected_gradients(first, GetParam());
    const auto result =
        run_groups(kDtypeWorld, [&](const ProcessGroup& group, std::string& output) {
          const auto module = std::make_shared<Mixed>();
          DistributedDataParallel model{
              module,
              group,
              {.weighting = GetParam(), .bucket_caps = {.first_bytes = 64, .bytes = 256}}};
          for (int step = 0; step < 3; ++step) {
            module->zero_grad(/*set_to_none=*/step == 1);
            const Tensor rows = rows_of(group.rank());
            if (GetParam() == GradientWeighting::kSamples) model.set_num_samples(rows.size(0));
            model(rows, first, left_out_on(group.rank(), first)).backward();
            for (size_t i = 0; i < expected.size(); ++i) {
              check_mean(module->parameters()[i], expected[i],
                         format("step {}, {}", step, module->named_parameters()[i].key()));
            }
          }
          output = model.learned_layout()->to_string();
        });
    ASSERT_TRUE(result.ok()) << result.failures();
    for (const Type& type : kTypes) {
      EXPECT_NE(result.ranks[0].output.find(type.name), std::string::npos);
    }
    const size_t last = result.ranks[0].output.rfind(';') + 1;
    EXPECT_EQ(result.ranks[0].output.substr(last).find(kTypes[first].name), 0u)
        << result.ranks[0].output;
  }
}

INSTANTIATE_TEST_SUITE_P(Weightings, DdpDTypes,
                         ::testing::Values(GradientWeighting::kEqual, GradientWeighting::kSamples,
                                           GradientWeighting::kSum),
                         [](const auto& test) {
                           return test.param == GradientWeighting::kSum     ? "sum"
                                  : test.param == GradientWeighting::kEqual ? "equal"
                                                                            : "samples";
                         });

}  // namespace
}  // namespace cadre
