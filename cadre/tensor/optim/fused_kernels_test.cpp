// Tests that inputs for which the fused kernels would compute wrong results are refused before
// anything changes.
#include <ATen/ops/_efficientzerotensor.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "cadre/tensor/optim/fused_kernels.h"
#include "cadre/testing/torch/optimizer_rules.h"

namespace cadre::optim_test {
namespace {

using ::testing::HasSubstr;

// Returns the error of a step on `bad`. A good parameter comes before `bad` in the list; the step
// must not change it.
template <typename Made = AdamW, typename Options = torch::optim::AdamWOptions>
std::string refusal_of(const at::Tensor& bad, const Options& options = Options(kRate)) {
  const at::Tensor good = torch::ones({4}).requires_grad_(true);
  good.mutable_grad() = torch::ones({4});
  const at::Tensor no_gradient = torch::ones({4}).requires_grad_(true);
  Made optimizer(Tensors{good, no_gradient, bad}, options);
  const auto version = good._version();
  std::string text = refusal(optimizer);
  EXPECT_TRUE(good.equal(torch::ones({4}))) << "a refused step has changed a parameter";
  EXPECT_EQ(good._version(), version);
  EXPECT_TRUE(optimizer.state().empty());
  return text;
}

at::Tensor with_gradient(const at::Tensor& parameter, const at::Tensor& gradient) {
  parameter.mutable_grad() = gradient;
  return parameter;
}

TEST(FusedRefusal, AGradientThatIsNotLikeItsParameter) {
  const at::Tensor weight = torch::ones({2, 3}, at::kDouble).requires_grad_(true);
  weight.set_grad_dtype(at::kFloat);
  EXPECT_EQ(
      refusal_of(with_gradient(weight, torch::ones({2, 3}))),
      "cadre::AdamW: the gradient of parameter 2 is dense Float (2, 3) on cpu; expected dense "
      "Double (2, 3) on cpu, as the parameter. Convert the gradient before the step");

  torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 2).sparse(true));
  table->forward(torch::tensor({1, 3})).sum().backward();
  for (const std::string& text :
       {refusal_of(table->weight), refusal_of<SGD>(table->weight, torch::optim::SGDOptions(kRate)),
        refusal_of<Adam>(table->weight, torch::optim::AdamOptions(kRate))}) {
    EXPECT_THAT(text, HasSubstr("the gradient of parameter 2 is sparse Float (5, 2) on cpu"));
  }
}

TEST(FusedRefusal, AGradientOfOtherSizes) {
  const at::Tensor weight = torch::ones({4}).requires_grad_(true);
  const at::Tensor gradient = torch::ones({4});
  weight.mutable_grad() = gradient;
  const at::Tensor less = torch::ones({3});
  gradient.unsafeGetTensorImpl()->set_sizes_contiguous(less.sizes());
  EXPECT_THAT(refusal_of(weight), HasSubstr("dense Float (3) on cpu; expected dense Float (4)"));
}

TEST(FusedRefusal, AParameterThatNoKernelComputes) {
  const auto complex = torch::ones({2}, at::kComplexFloat).requires_grad_(true);
  EXPECT_THAT(refusal_of(with_gradient(complex, torch::ones({2}, at::kComplexFloat))),
              HasSubstr("parameter 2 is dense ComplexFloat (2) on cpu, which the fused kernel does "
                        "not compute; it computes Double, Float, BFloat16, Half."));
  const auto gaps = torch::ones({8}).slice(0, 0, 8, 2).detach().requires_grad_(true);
  EXPECT_THAT(refusal_of(with_gradient(gaps, torch::ones({4}))),
              HasSubstr("parameter 2 has strides (2) for sizes (4), a view with gaps"));
  const auto repeated = torch::ones({1}).expand({4}).detach().requires_grad_(true);
  EXPECT_THAT(refusal_of(with_gradient(repeated, torch::ones({4}))),
              HasSubstr("has strides (0) for sizes (4)"));
  const auto negated = torch::_neg_view(torch::ones({4})).detach().requires_grad_(true);
  EXPECT_THAT(refusal_of(with_gradient(negated, torch::ones({4}))), HasSubstr("a negated one"));
  const auto sparse = torch::ones({4}).to_sparse().detach().requires_grad_(true);
  EXPECT_THAT(refusal_of(with_gradient(sparse, torch::ones({4}).to_sparse())),
              HasSubstr("parameter 2 is sparse Float (4) on cpu; expected a dense tensor"));
}

// A parameter made in inference mode has no version counter for a step to increment.
TEST(FusedRefusal, AParameterMadeInInferenceMode) {
  const auto make = [] {
    const c10::InferenceMode inference;
    return torch::ones({4});
  };
  const at::Tensor weight = make();
  const std::string sentence =
      "parameter 2 was made in inference mode, outside of which it cannot be changed";
  EXPECT_THAT(refusal_of(with_gradient(weight, torch::ones({4}))), HasSubstr(sentence));
  EXPECT_THAT(
      refusal_of<SGD>(with_gradient(weight, torch::ones({4})), torch::optim::SGDOptions(kRate)),
      HasSubstr(sentence));
  EXPECT_TRUE(weight.equal(torch::ones({4})));
  const c10::InferenceMode inference;
  SGD optimizer(Tensors{with_gradient(make(), torch::ones({4}))}, torch::optim::SGDOptions(0.5));
  EXPECT_EQ(refusal(optimizer), "") << "in inference mode it can";
  EXPECT_TRUE(optimizer.param_groups()[0].params()[0].equal(torch::full({4}, 0.5)));
}

TEST(FusedRefusal, AParameterWithoutMemory) {
  const at::Tensor zero = at::_efficientzerotensor({4}, torch::TensorOptions(at::kFloat));
  EXPECT_THAT(refusal_of(with_gradient(zero.requires_grad_(true), torch::ones({4}))),
              HasSubstr("parameter 2 is a zero tensor without memory"));
}

// The kernel of torch 2.13 would leave a parameter of 16 bits unchanged without an error.
TEST(FusedRefusal, HalfPrecisionUnderSgd) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const auto weight = torch::ones({64}, dtype).requires_grad_(true);
    EXPECT_THAT(refusal_of<SGD>(with_gradient(weight, torch::ones({64}, dtype)),
                                torch::optim::SGDOptions(kRate)),
                HasSubstr("it computes Double, Float. Use the optimizer of torch::optim for it"));
  }
}

// Calls the SGD kernel directly, without the check of dtypes. If this test fails, the kernel of
// this libtorch supports these dtypes, and kSgdDtypes may include them.
TEST(FusedRefusal, TheSgdKernelStillIgnoresHalfPrecision) {
  const torch::NoGradGuard no_grad;
  const at::Tensor weight = torch::ones({64}, at::kBFloat16);
  run_fused_sgd({{weight}, {torch::ones({64}, at::kBFloat16)}, {}, {}},
                {.learning_rate = 0.5, .is_first_step = true}, TailRounding::kByKernel);
  EXPECT_TRUE(weight.equal(torch::ones({64}, at::kBFloat16)));
}

TEST(FusedRefusal, AStateThatDoesNotFit) {
  const at::Tensor weight = with_gradient(torch::ones({4}).requires_grad_(true), torch::ones({4}));
  AdamW optimizer(Tensors{weight}, torch::optim::AdamWOptions(kRate));
  optimizer.step();
  auto& options = static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options());
  options.amsgrad(true);
  const at::Tensor before = weight.detach().clone();
  EXPECT_THAT(refusal(optimizer), HasSubstr("the state of parameter 0 has no max_exp_avg_sq"));
  options.amsgrad(false);
  auto& state = static_cast<torch::optim::AdamWParamState&>(
      *optimizer.state().at(weight.unsafeGetTensorImpl()));
  state.exp_avg(torch::zeros({4}, at::kDouble));
  EXPECT_THAT(refusal(optimizer),
              HasSubstr("the state exp_avg of parameter 0 is dense Double (4)"));
  state.exp_avg(torch::zeros({5}));
  EXPECT_THAT(refusal(optimizer), HasSubstr("expected dense Float (4) on cpu, as the parameter"));
  EXPECT_TRUE(weight.equal(before));
  EXPECT_EQ(state.step(), 1);
}

TEST(FusedRefusal, TheOptionsOfAnotherOptimizer) {
  const at::Tensor weight = with_gradient(torch::ones({4}).requires_grad_(true), torch::ones({4}));
  AdamW optimizer(Tensors{weight}, torch::optim::AdamWOptions(kRate));
  optimizer.param_groups()[0].set_options(std::make_unique<torch::optim::SGDOptions>(kRate));
  EXPECT_THAT(refusal(optimizer),
              HasSubstr("parameter group 0 has the options of another optimizer"));
}

TEST(FusedRefusal, HasTheNameOfANamedParameter) {
  torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  net->forward(torch::ones({1, 2})).sum().backward();
  net->parameters()[3].mutable_grad() = torch::ones({2}).to_sparse();
  const auto named = net->named_parameters();
  AdamW adamw(named);
  Adam adam(named);
  SGD sgd(named, torch::optim::SGDOptions(kRate));
  for (Optimizer* optimizer : std::vector<Optimizer*>{&adamw, &adam, &sgd}) {
    EXPECT_THAT(refusal(*optimizer), HasSubstr("the gradient of parameter 3 (1.bias) is sparse"));
  }
}

// The optimizer must accept a gradient that is a zero tensor without memory, which the derivatives
// of some operators return.
TEST(FusedRefusal, NotALazyZero) {
  const at::Tensor weight = torch::full({20}, 2.0).requires_grad_(true);
  const at::Tensor truth = weight.detach().clone().requires_grad_(true);
  SGD own(Tensors{weight}, torch::optim::SGDOptions(0.5).momentum(0.9));
  torch::optim::SGD oracle({truth}, torch::optim::SGDOptions(0.5).momentum(0.9));
  for (const double gradient : {0.0, 1.0, 0.0}) {
    truth.mutable_grad() = torch::full({20}, gradient);
    weight.mutable_grad() = truth.grad().clone();
    if (gradient == 0) weight.mutable_grad() = at::_efficientzerotensor({20}, weight.options());
    EXPECT_EQ(refusal(own), "");
    oracle.step();
  }
  EXPECT_TRUE(weight.equal(truth));
}

// A gradient with other strides than the parameter is accepted: the step uses a copy with the
// strides of the parameter.
TEST(FusedRefusal, NotAGradientWithOtherStrides) {
  for (const at::Tensor& gradient :
       {torch::tensor({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}).reshape({2, 3}),
        torch::tensor({1.0, 2.0, 3.0}).expand({2, 3}), torch::tensor({7.0}).expand({2, 3}),
        torch::_neg_view(torch::tensor({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}).reshape({2, 3}))}) {
    for (const at::Tensor& values : {torch::ones({3, 2}).t(), torch::ones({2, 3})}) {
      const at::Tensor weight = values.detach().requires_grad_(true);
      weight.mutable_grad() = gradient.to(at::kFloat);
      SGD optimizer(Tensors{weight}, torch::optim::SGDOptions(0.5));
      optimizer.step();
      EXPECT_TRUE(weight.equal(1 - 0.5 * gradient.to(at::kFloat)));
    }
  }
}

}  // namespace
}  // namespace cadre::optim_test
