// Tests that a checkpointed module computes the gradients of the plain one, and keeps only its
// arguments.
#include "cadre/tensor/hooks/activations/activation_checkpoint.h"

#include <torch/csrc/autograd/autograd.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cadre/tensor/hooks/autocast.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: the helpers of these tests
using ::testing::HasSubstr;
namespace nn = torch::nn;

struct DropImpl : nn::Module {
  DropImpl() {
    torch::manual_seed(2);
    linear = register_module("linear", nn::Linear(3, 3));
    to(kDouble);
  }
  Tensor forward(const Tensor& x) {
    ++num_forwards;
    return torch::dropout(torch::tanh(linear(x)), 0.5, is_training());
  }
  nn::Linear linear{nullptr};
  int num_forwards = 0;
};

struct ManyImpl : nn::Module {
  ManyImpl() { scale = register_parameter("scale", torch::full({1}, 3.0, kDouble)); }
  std::tuple<Tensor, std::optional<Tensor>, Tensor> forward(const std::vector<Tensor>& parts,
                                                            std::optional<Tensor> nothing,
                                                            int64_t times) const {
    return {parts[0] * scale * times, nothing, parts[1] + 1};
  }
  Tensor scale;
};

// Returns the gradients of the input and of the parameters.
template <typename M>
std::vector<Tensor> gradients_of(M& module, bool input_requires_grad) {
  const Tensor x = input().clone().requires_grad_(input_requires_grad);
  torch::manual_seed(11);
  const Tensor y = module.forward(x);
  torch::rand({5});  // changes the RNG state between forward and backward
  module.forward(y).pow(2).sum().backward();
  // The first result is a random tensor, which shows the generator's state after the backward.
  std::vector<Tensor> gradients = {torch::rand({2})};
  if (input_requires_grad) gradients.push_back(x.grad());
  for (const Tensor& parameter : module.parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

TEST(ActivationCheckpoint, ComputesTheGradientsOfThePlainModule) {
  for (const bool input_requires_grad : {true, false}) {
    DropImpl plain;
    ActivationCheckpoint<DropImpl> checkpointed;
    const auto expected = gradients_of(plain, input_requires_grad);
    const auto gradients = gradients_of(checkpointed, input_requires_grad);
    ASSERT_EQ(gradients.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(torch::equal(gradients[i], expected[i])) << i;
    }
    EXPECT_EQ(checkpointed.num_forwards, 2 * plain.num_forwards);
  }
}

TEST(ActivationCheckpoint, TakesAndReturnsTensorsInOtherTypes) {
  const ManyImpl plain;
  const ActivationCheckpoint<ManyImpl> checkpointed;
  const auto run = [](const auto& module) {
    const Tensor x = torch::ones({2}, kDouble).requires_grad_(true);
    const auto [product, nothing, integers] =
        module.forward({x, torch::ones({2}, torch::kLong)}, std::nullopt, 4);
    EXPECT_FALSE(nothing);
    EXPECT_FALSE(integers.requires_grad());
    EXPECT_EQ(integers.sum().template item<int64_t>(), 4);
    product.sum().backward();
    EXPECT_EQ(x.grad()[0].template item<double>(), 12);
    EXPECT_EQ(module.scale.grad().template item<double>(), 8);
  };
  run(plain);
  run(checkpointed);
}

TEST(ActivationCheckpoint, IsAModuleLikeThePlainOne) {
  nn::Sequential sequential(ActivationCheckpoint<DropImpl>{}, nn::Linear(3, 3));
  EXPECT_EQ(sequential->named_parameters().keys()[0], "0.linear.weight");
  ActivationCheckpoint<DropImpl> module;
  {
    const torch::NoGradGuard no_grad;
    module.forward(input());
  }
  EXPECT_EQ(module.num_forwards, 1);
}

// The casts of parameters that autocast caches in the second forward must not be used by the next
// step's forward.
TEST(ActivationCheckpoint, UsesNewValuesAfterAStepUnderAutocast) {
  struct ProductImpl : nn::Module {
    ProductImpl() { weight = register_parameter("weight", torch::full({1, 1}, 2.0F)); }
    Tensor forward(const Tensor& x) { return torch::mm(x, weight); }
    Tensor weight;
  };
  ActivationCheckpoint<ProductImpl> module;
  for (const float value : {2.0F, 3.0F, 4.0F}) {
    module.weight.data().fill_(value);
    Tensor y;
    {
      const Autocast autocast;
      y = module.forward(torch::ones({1, 1})).to(torch::kFloat);
    }
    EXPECT_EQ(y.item<float>(), value);
    y.sum().backward();
  }
}

struct SquashImpl : nn::Module {
  SquashImpl() { weight = register_parameter("weight", torch::linspace(-1, 1, 16).view({4, 4})); }
  Tensor forward(const Tensor& x) { return torch::mm(torch::tanh(torch::mm(x, weight)), weight); }
  Tensor weight;
};

// The backward is called outside of the autocast scope, but must recompute the forward under
// autocast. Otherwise it would compute products in float32.
TEST(ActivationCheckpoint, ComputesAgainUnderTheAutocastOfTheForward) {
  const auto gradient = [](auto& module, std::optional<torch::ScalarType> dtype) {
    Tensor y;
    {
      std::optional<Autocast> autocast;
      if (dtype) autocast.emplace(*dtype);
      y = module.forward(torch::linspace(0, 1, 12).view({3, 4})).to(torch::kFloat);
    }
    module.zero_grad();
    y.pow(2).sum().backward();
    return module.weight.grad().clone();
  };
  SquashImpl plain;
  ActivationCheckpoint<SquashImpl> checkpointed;
  for (const torch::ScalarType dtype : {torch::kBFloat16, torch::kHalf}) {
    const Tensor expected = gradient(plain, dtype);
    EXPECT_TRUE(torch::equal(gradient(checkpointed, dtype), expected)) << dtype;
    EXPECT_FALSE(torch::equal(gradient(plain, std::nullopt), expected)) << "rounding is seen";
  }
}

TEST(ActivationCheckpoint, NoticesAnArgumentThatWasChanged) {
  ActivationCheckpoint<DropImpl> module;
  const Tensor x = input().clone();
  const Tensor y = module.forward(x).sum();
  x.add_(1);
  EXPECT_THROW(y.backward(), c10::Error);
}

struct InPlaceImpl : nn::Module {
  Tensor forward(const Tensor& x, const Tensor& y) { return Tensor(y).add_(1) * x; }
};

TEST(ActivationCheckpoint, RefusesAModuleThatChangesAnArgument) {
  ActivationCheckpoint<InPlaceImpl> module;
  const Tensor x = input().clone().requires_grad_(true);
  EXPECT_EQ(error_of([&] { module.forward(x, input().clone()); }, ErrorCode::kInvalidArgument),
            "cadre::ActivationCheckpoint: forward() has changed tensor 1 of 2 among its arguments "
            "in place, and backward would compute it again from the changed values. Work on a "
            "copy: x.clone(), or x + y instead of x.add_(y)");
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(module.forward(x, input().clone()).defined());
}

struct NormImpl : nn::Module {
  NormImpl() {
    norm = register_module("norm", nn::BatchNorm1d(3));
    to(kDouble);
  }
  Tensor forward(const Tensor& x) { return torch::tanh(norm(x)); }
  nn::BatchNorm1d norm{nullptr};
};

TEST(ActivationCheckpoint, MovesTheStatisticsOfABatchNormOnce) {
  NormImpl plain;
  ActivationCheckpoint<NormImpl> checkpointed;
  const auto expect_equal = [](const Tensor& actual, const Tensor& expected) {
    EXPECT_TRUE(torch::allclose(actual, expected, 1e-12, 1e-14)) << actual << "\n" << expected;
  };
  for (int step = 0; step < 3; ++step) {
    const Tensor x = torch::sin(torch::arange(12, kDouble) + step).view({4, 3});
    plain.forward(plain.forward(x)).pow(2).sum().backward();
    checkpointed.forward(checkpointed.forward(x)).pow(2).sum().backward();
    expect_equal(checkpointed.norm->running_mean, plain.norm->running_mean);
    expect_equal(checkpointed.norm->running_var, plain.norm->running_var);
    EXPECT_EQ(checkpointed.norm->num_batches_tracked.item<int64_t>(), 2 * (step + 1));
    expect_equal(checkpointed.norm->weight.grad(), plain.norm->weight.grad());
  }
}

TEST(ActivationCheckpoint, RefusesSecondDerivatives) {
  ActivationCheckpoint<DropImpl> module;
  const Tensor x = input().clone().requires_grad_(true);
  const Tensor y = module.forward(x).sum();
  EXPECT_THAT(error_of([&] { torch::autograd::grad({y}, {x}, {}, std::nullopt, true); },
                       ErrorCode::kInvalidArgument),
              HasSubstr("create_graph=true does not go through"));
}

// autograd::grad() and backward() with a list of inputs must throw, because they would also add to
// the gradients of the module's parameters, which the program did not request.
TEST(ActivationCheckpoint, RefusesABackwardOfSomeInputs) {
  ActivationCheckpoint<DropImpl> module;
  const Tensor x = input().clone().requires_grad_(true);
  for (const bool is_backward : {false, true}) {
    const Tensor y = module.forward(x).sum();
    EXPECT_THAT(error_of(
                    [&] {
                      if (is_backward) {
                        torch::autograd::backward({y}, {}, /*retain_graph=*/false,
                                                  /*create_graph=*/false, {x});
                      } else {
                        torch::autograd::grad({y}, {x});
                      }
                    },
                    ErrorCode::kInvalidArgument),
                HasSubstr("do not go through a checkpointed module"));
    for (const Tensor& parameter : module.parameters()) EXPECT_FALSE(parameter.grad().defined());
  }
}

struct ReturnsItsWeight : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", torch::ones({3}));
  std::vector<at::Tensor> forward(at::Tensor x) { return {weight, x * weight}; }
};

TEST(ActivationCheckpoint, AParameterThatIsReturnedStaysALeaf) {
  ActivationCheckpoint<ReturnsItsWeight> module;
  const auto outputs = module.forward(torch::full({3}, 2.0));
  EXPECT_TRUE(module.weight.is_leaf());
  // If the weight were not a leaf, the backward below would deadlock.
  if (!module.weight.is_leaf()) return;
  (3 * outputs[0] + outputs[1]).sum().backward();
  EXPECT_TRUE(module.weight.grad().equal(torch::full({3}, 5.0)));
}

}  // namespace
}  // namespace cadre
