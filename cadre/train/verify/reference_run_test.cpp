// Tests the bounds that are derived from a reference run, and which deviation a comparison records.
#include "cadre/train/verify/reference_run.h"

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <memory>
#include <utility>
#include <vector>

#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/verify/comparison.h"

namespace cadre::verify {
namespace {

using at::Tensor;

constexpr double kRate = 0.1;

template <typename Optimizer>
struct ScriptedRule final : UpdateRule {
  template <typename Options>
  ScriptedRule(std::vector<Tensor> parameters, const Options& options)
      : optimizer(std::move(parameters), options) {}
  void update(int64_t /*step*/) override { optimizer.step(); }
  Optimizer optimizer;
};

// A training with one parameter "p", which gets the same gradient in each step.
template <typename Optimizer, typename Options>
struct Scripted final : ReferenceTraining {
  Scripted(const Tensor& initial, Tensor given, Options given_options)
      : parameter(initial.clone().requires_grad_(true)),
        gradient(std::move(given)),
        options(std::move(given_options)),
        rule({parameter}, options) {}
  double backward(int64_t /*step*/) override {
    parameter.mutable_grad() = gradient.clone();
    return 1;
  }
  std::vector<NamedTensor> gradients() override { return {{"p", parameter.grad()}}; }
  void update(int64_t step) override { rule.update(step); }
  std::vector<NamedTensor> parameters() override { return {{"p", parameter}}; }
  std::unique_ptr<UpdateRule> rule_for(const std::vector<NamedTensor>& parameters) override {
    return std::make_unique<ScriptedRule<Optimizer>>(std::vector<Tensor>{parameters[0].tensor},
                                                     options);
  }
  Tensor parameter;
  Tensor gradient;
  Options options;
  ScriptedRule<Optimizer> rule;
};

template <typename Optimizer, typename Options>
ReferenceRun run_scripted(at::ScalarType dtype, const Options& options) {
  const Tensor initial = torch::tensor({1.0, -0.5, 0.25}, dtype);
  const Tensor gradient = torch::tensor({2.0, 1e-7, 0.0}, dtype);
  ReferenceRun run;
  const auto result = testing::run_groups(1, [&](const ProcessGroup& group) {
    const VerificationOptions verification{.num_steps = 2};
    run = run_reference(group,
                        {.make_reference =
                             [&](const ProcessGroup&) {
                               return std::make_unique<Scripted<Optimizer, Options>>(
                                   initial, gradient, options);
                             },
                         .make_training = {}},
                        verification);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return run;
}

TEST(ReferenceRun, InFloat64BoundsAreSharesOfTheLargestValue) {
  const ReferenceRun run = run_scripted<torch::optim::AdamW>(
      torch::kDouble, torch::optim::AdamWOptions(kRate).weight_decay(0));
  ASSERT_EQ(run.steps.size(), 2U);
  EXPECT_EQ(run.steps[0].loss_bound, 1e-10);
  EXPECT_EQ(run.steps[0].gradients[0].scale, 2);
  EXPECT_EQ(run.steps[0].gradients[0].bound, 1e-10);
  EXPECT_NEAR(run.steps[0].parameters[0].scale, 1 - kRate, 1e-6);
  EXPECT_FALSE(run.steps[1].parameters[0].bounds.defined());
}

// A gradient of 1e-7 may differ by 2e-5, so it may have either sign, and so may AdamW's update.
TEST(ReferenceRun, InFloat32AnElementMayDifferByWhatItsUpdateMakesOfTheGradientsBound) {
  const ReferenceRun run = run_scripted<torch::optim::AdamW>(
      torch::kFloat, torch::optim::AdamWOptions(kRate).weight_decay(0));
  const ReferenceTensor& first = run.steps[0].parameters[0];
  ASSERT_TRUE(first.bounds.defined());
  const Tensor absolute = first.bounds * first.scale;
  EXPECT_NEAR(absolute[0].item<double>(), 1e-5 * first.scale, 1e-6);
  EXPECT_GT(absolute[1].item<double>(), 2 * kRate);  // the update may have either sign
  EXPECT_LT(absolute[1].item<double>(), 4.1 * kRate);
  EXPECT_GT(absolute[2].item<double>(), 1.9 * kRate);
  // The bound grows from step to step.
  const ReferenceTensor& second = run.steps[1].parameters[0];
  EXPECT_GT((second.bounds * second.scale)[1].item<double>(), 1.5 * absolute[1].item<double>());
}

TEST(ReferenceRun, AnUpdateThatIsLinearInTheGradientKeepsTheShare) {
  const ReferenceRun run =
      run_scripted<torch::optim::SGD>(torch::kFloat, torch::optim::SGDOptions(kRate));
  const ReferenceTensor& last = run.steps[1].parameters[0];
  EXPECT_NEAR((last.bounds * last.scale).max().item<double>(), 1e-5, 1e-5);
}

// The loss is the mean of p^power at p = 1, so a relative change of p changes the gradient by about
// `power` times as much. The parameter "small" has a gradient of 1e-6.
struct Steep final : ReferenceTraining {
  explicit Steep(double of) : power(of) {}
  double backward(int64_t /*step*/) override {
    p.mutable_grad().reset();
    small.mutable_grad().reset();
    const Tensor loss = p.pow(power).mean() + 1e-6 * small.sum();
    loss.backward();
    return loss.item<double>();
  }
  std::vector<NamedTensor> gradients() override {
    return {{"p", p.grad()}, {"small", small.grad()}};
  }
  void update(int64_t /*step*/) override {}
  std::vector<NamedTensor> parameters() override { return {{"p", p}, {"small", small}}; }
  std::unique_ptr<UpdateRule> rule_for(const std::vector<NamedTensor>& parameters) override {
    return std::make_unique<ScriptedRule<torch::optim::SGD>>(
        std::vector<Tensor>{parameters[0].tensor, parameters[1].tensor},
        torch::optim::SGDOptions(kRate));
  }
  double power;
  Tensor p = torch::ones({1000}).requires_grad_();
  Tensor small = torch::ones({1}).requires_grad_();
};

std::vector<ReferenceTensor> gradients_of_steep(double power) {
  std::vector<ReferenceTensor> gradients;
  const auto result = testing::run_groups(1, [&](const ProcessGroup& group) {
    const VerificationOptions options{.num_steps = 1};
    const ReferenceRun run = run_reference(
        group,
        {.make_reference = [&](const ProcessGroup&) { return std::make_unique<Steep>(power); },
         .make_training = {}},
        options);
    gradients = run.steps.at(0).gradients;
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return gradients;
}

// The expected bound is four times the change that the gradient gets if parameters are rounded by
// up to 2^-22, but at most 1e-2.
TEST(ReferenceRun, InFloat32ABoundIsWhatRoundingMakesOfTheGradient) {
  EXPECT_EQ(gradients_of_steep(2)[0].bound, 1e-5);
  const auto gradients = gradients_of_steep(1000);
  EXPECT_NEAR(gradients[0].bound, 4 * 999 * 0x1p-22, 5e-5);
  EXPECT_EQ(gradients_of_steep(100'000)[0].bound, 1e-2);
  EXPECT_NEAR(gradients[0].scale, 1, 1e-6);
  EXPECT_NEAR(gradients[1].scale, 0.01, 1e-6) << "expected 1 % of the model's largest gradient";
}

}  // namespace
}  // namespace cadre::verify
