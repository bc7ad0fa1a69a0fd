// Compares Adadelta with its formula, and tests saving and loading its state.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "cadre/core/base/error.h"
#include "cadre/testing/torch/optimizer_rules.h"

namespace cadre::optim_test {
namespace {

using ::testing::HasSubstr;

AdadeltaOptions options() {
  return AdadeltaOptions(0.5).rho(0.8).weight_decay(0.05);
}

struct Sums {
  at::Tensor square, accumulated;
};

// Makes one step by the formula of torch.optim.Adadelta, in double, with the options above.
void step_by_formula(at::Tensor& parameter, Sums& sums, const at::Tensor& gradient) {
  const at::Tensor g = gradient.to(at::kDouble) + 0.05 * parameter;
  sums.square = 0.8 * sums.square + 0.2 * g * g;
  const at::Tensor delta = (sums.accumulated + 1e-6).sqrt() / (sums.square + 1e-6).sqrt() * g;
  sums.accumulated = 0.8 * sums.accumulated + 0.2 * delta * delta;
  parameter = parameter - 0.5 * delta;
}

TEST(Adadelta, IsTheFormula) {
  const Tensors own = make_parameters(at::kFloat);
  Adadelta optimizer(own, options());
  Tensors expected;
  std::vector<Sums> sums;
  for (const at::Tensor& parameter : own) {
    expected.push_back(parameter.detach().to(at::kDouble));
    sums.push_back({torch::zeros_like(expected.back()), torch::zeros_like(expected.back())});
  }
  for (int step = 0; step < 20; ++step) {
    set_gradients(own, own, step);
    optimizer.step();
    for (size_t i = 0; i < own.size(); ++i) {
      if (own[i].grad().defined()) step_by_formula(expected[i], sums[i], own[i].grad());
      EXPECT_TRUE(own[i].detach().to(at::kDouble).allclose(expected[i], 1e-5, 1e-6))
          << "parameter " << i << " in step " << step;
    }
  }
}

TEST(Adadelta, AGroupKeepsItsOptions) {
  const Tensors own = make_parameters(at::kFloat);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Tensors{own[0]}, std::make_unique<AdadeltaOptions>(options()));
  groups.emplace_back(Tensors{own[1]});
  Adadelta optimizer(groups, AdadeltaOptions(0.25));
  optimizer.add_param_group({{own[2]}, std::make_unique<AdadeltaOptions>(options())});
  ASSERT_EQ(optimizer.param_groups().size(), 3u);
  const auto options_of = [&](size_t i) {
    return static_cast<const AdadeltaOptions&>(optimizer.param_groups()[i].options());
  };
  for (const size_t i : {0, 2}) {
    EXPECT_EQ(options_of(i).lr(), 0.5) << i;
    EXPECT_EQ(options_of(i).rho(), 0.8) << i;
    EXPECT_EQ(options_of(i).weight_decay(), 0.05) << i;
  }
  EXPECT_EQ(options_of(1).lr(), 0.25);
  EXPECT_EQ(options_of(1).rho(), 0.9);
}

TEST(Adadelta, AnArchiveHasOptionsAndState) {
  const Tensors straight = make_parameters(at::kFloat);
  Adadelta whole(straight, options());
  for (int step = 0; step < 4; ++step) {
    set_gradients(straight, straight, step);
    whole.step();
  }
  const Tensors copied = copies(straight);
  Adadelta resumed(copied);
  std::stringstream file;
  torch::save(whole, file);
  torch::load(resumed, file);
  const auto& loaded = static_cast<const AdadeltaOptions&>(resumed.param_groups()[0].options());
  EXPECT_EQ(loaded.lr(), 0.5);
  EXPECT_EQ(loaded.rho(), 0.8);
  EXPECT_EQ(loaded.weight_decay(), 0.05);
  const auto& state =
      static_cast<const AdadeltaParamState&>(*resumed.state().at(copied[0].unsafeGetTensorImpl()));
  EXPECT_EQ(state.step(), 4);
  for (int step = 4; step < 8; ++step) {
    set_gradients(straight, copied, step);
    whole.step();
    resumed.step();
  }
  for (size_t i = 0; i < copied.size(); ++i) {
    EXPECT_TRUE(copied[i].equal(straight[i])) << "parameter " << i;
  }
}

TEST(Adadelta, RefusesWhatItsOptionsAndItsParametersDoNotAllow) {
  const at::Tensor weight = torch::ones({2}).requires_grad_(true);
  EXPECT_THROW(Adadelta(Tensors{weight}, AdadeltaOptions(1).rho(1.5)), c10::ValueError);
  EXPECT_THROW(Adadelta(Tensors{weight}, AdadeltaOptions(-1)), c10::ValueError);
  const at::Tensor number = torch::ones({2}, at::kComplexFloat).requires_grad_(true);
  number.mutable_grad() = torch::ones({2}, at::kComplexFloat);
  Adadelta optimizer(NamedParameters({{"phase", number}}));
  EXPECT_THAT(refusal(optimizer), HasSubstr("cadre::Adadelta: parameter 0 (phase) is "));
}

}  // namespace
}  // namespace cadre::optim_test
