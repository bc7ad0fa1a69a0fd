#include "cadre/tensor/optim/optimizers.h"

#include <c10/util/Type.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/testing/torch/optimizer_rules.h"

namespace cadre::optim_test {
namespace {

constexpr int kSteps = 50;

double distance(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == 0 ? 0 : (a - b).abs().max().item<double>();
}

void expect_close(const Tensors& own, const Tensors& truth, int num_steps) {
  for (size_t i = 0; i < own.size(); ++i) {
    EXPECT_LE(distance(own[i], truth[i]), bound(truth[i], num_steps))
        << "parameter " << i << " after " << num_steps << " steps";
  }
}

void expect_equal(const Tensors& a, const Tensors& b) {
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << "parameter " << i;
}

class FusedTest : public ::testing::TestWithParam<Rule> {
 protected:
  // The tensors are small, and on a busy machine a second thread would make a step ten times
  // slower.
  FusedTest() { at::set_num_threads(1); }
};

TEST_P(FusedTest, IsTorchOptim) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    const Tensors own = make_parameters(dtype);
    const Tensors truth = copies(own);
    const auto optimizer = GetParam().ours(own);
    const auto oracle = GetParam().torchs(truth);
    for (int step = 0; step < kSteps; ++step) {
      set_gradients(own, truth, step);
      optimizer->step();
      oracle->step();
      expect_close(own, truth, step + 1);
    }
    if (dtype == at::kFloat) continue;
    for (size_t i = 0; i < own.size(); ++i) {
      const double scale = truth[i].numel() == 0 ? 1 : truth[i].abs().max().item<double>();
      EXPECT_LE(distance(own[i], truth[i]), 1e-12 * scale) << "parameter " << i;
    }
  }
}

// Steps on slices of a flat buffer must be bitwise equal to steps on the whole buffer, and must not
// change the gaps between the slices.
TEST_P(FusedTest, SlicesHaveTheBitsOfTheWhole) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    torch::manual_seed(5);
    const int64_t numel = 20'011;
    const at::Tensor whole = torch::randn({numel}, dtype).requires_grad_(true);
    const at::Tensor truth = whole.detach().clone().requires_grad_(true);
    const at::Tensor flat = whole.detach().clone();
    const at::Tensor gradients = torch::empty({numel}, dtype);
    // The cuts make adjacent slices share cache lines and SIMD vectors, and leave one gap of three
    // elements.
    std::vector<std::pair<int64_t, int64_t>> cuts = {{0, 1}, {1, 18}, {18, 50}, {50, 51}};
    for (int64_t begin = 54; begin < 3001; begin += 7) cuts.emplace_back(begin, begin + 7);
    cuts.emplace_back(cuts.back().second, 15'001);
    cuts.emplace_back(15'001, numel);
    Tensors slices;
    for (const auto& [begin, end] : cuts) {
      slices.push_back(flat.slice(0, begin, end).detach().requires_grad_(true));
      slices.back().mutable_grad() = gradients.slice(0, begin, end);
    }
    const at::Tensor gap = flat.slice(0, 51, 54).clone();
    const auto of_slices = GetParam().ours(slices);
    // The factory divides the tensors into two groups with different learning rates, which would
    // differ between slices and whole buffer. So all groups get the same rate.
    for (auto& group : of_slices->param_groups()) group.options().set_lr(kRate);
    const auto of_whole = GetParam().ours({whole});
    const auto oracle = GetParam().torchs({truth});
    for (int step = 0; step < 6; ++step) {
      gradients.copy_(torch::randn({numel}, dtype));
      whole.mutable_grad() = gradients.clone();
      truth.mutable_grad() = gradients.clone();
      of_slices->step();
      oracle->step();
      at::set_num_threads(2);
      of_whole->step();
      at::set_num_threads(1);
    }
    EXPECT_TRUE(flat.slice(0, 51, 54).equal(gap));
    flat.slice(0, 51, 54).copy_(whole.detach().slice(0, 51, 54));
    EXPECT_TRUE(flat.equal(whole)) << (flat != whole).sum().item<int64_t>() << " elements differ";
    expect_close({whole}, {truth}, 6);
  }
}

std::stringstream saved(const Optimizer& optimizer) {
  std::stringstream stream;
  torch::save(optimizer, stream);
  return stream;
}

void run_steps(Optimizer& a, const Tensors& of_a, Optimizer& b, const Tensors& of_b, int begin,
               int end) {
  for (int step = begin; step < end; ++step) {
    set_gradients(of_a, of_b, step);
    a.step();
    b.step();
  }
}

TEST_P(FusedTest, GoesOnWhereTorchOptimStopped) {
  const Tensors truth = make_parameters(at::kFloat);
  const auto oracle = GetParam().torchs(truth);
  run_steps(*oracle, truth, *oracle, copies(truth), 0, 8);
  const Tensors own = copies(truth);
  const auto optimizer = GetParam().ours(own);
  std::stringstream file = saved(*oracle);
  torch::load(*optimizer, file);
  run_steps(*optimizer, own, *oracle, truth, 8, 20);
  expect_close(own, truth, 20);
}

TEST_P(FusedTest, TorchOptimGoesOnWhereItStopped) {
  const Tensors own = make_parameters(at::kFloat);
  const auto optimizer = GetParam().ours(own);
  run_steps(*optimizer, own, *optimizer, copies(own), 0, 8);
  const Tensors truth = copies(own);
  const Tensors again = copies(own);
  const auto oracle = GetParam().torchs(truth);
  const auto resumed = GetParam().ours(again);
  std::stringstream file = saved(*optimizer);
  torch::load(*oracle, file);
  file = saved(*optimizer);
  torch::load(*resumed, file);
  for (int step = 8; step < 20; ++step) {
    set_gradients(own, truth, step);
    set_gradients(own, again, step);
    optimizer->step();
    oracle->step();
    resumed->step();
  }
  expect_close(own, truth, 20);
  expect_equal(own, again);
}

TEST_P(FusedTest, ASchedulerSetsTheRate) {
  const Tensors own = make_parameters(at::kDouble);
  const Tensors truth = copies(own);
  const auto optimizer = GetParam().ours(own);
  const auto oracle = GetParam().torchs(truth);
  torch::optim::StepLR schedule(*optimizer, /*step_size=*/2, /*gamma=*/0.5);
  torch::optim::StepLR oracle_schedule(*oracle, /*step_size=*/2, /*gamma=*/0.5);
  for (int step = 0; step < 8; ++step) {
    run_steps(*optimizer, own, *oracle, truth, step, step + 1);
    schedule.step();
    oracle_schedule.step();
  }
  const double rate = optimizer->param_groups()[1].options().get_lr();
  EXPECT_LT(rate, kRate);
  EXPECT_EQ(rate, oracle->param_groups()[1].options().get_lr());
  expect_close(own, truth, 8);
}

// A parameter that is listed twice must be updated twice, as in torch::optim.
TEST_P(FusedTest, OneThatIsListedTwiceTakesTwoSteps) {
  Tensors own = make_parameters(at::kDouble);
  Tensors truth = copies(own);
  own.push_back(own.back());
  own.push_back(own[0]);
  truth.push_back(truth.back());
  truth.push_back(truth[0]);
  const auto optimizer = GetParam().ours(own);
  const auto oracle = GetParam().torchs(truth);
  run_steps(*optimizer, own, *oracle, truth, 0, 6);
  expect_close(own, truth, 12);
}

TEST_P(FusedTest, AutogradNoticesTheStep) {
  const at::Tensor weight = torch::ones({3}, at::kDouble).requires_grad_(true);
  const auto optimizer = GetParam().ours({weight});
  const at::Tensor squared = (weight * weight).sum();
  weight.mutable_grad() = torch::ones({3}, at::kDouble);
  optimizer->step();
  EXPECT_THROW(squared.backward(), c10::Error);
}

TEST_P(FusedTest, TheClosureComputesTheGradients) {
  const at::Tensor weight = torch::full({3}, 2.0, at::kDouble).requires_grad_(true);
  const at::Tensor truth = weight.detach().clone().requires_grad_(true);
  const auto optimizer = GetParam().ours({weight});
  const auto oracle = GetParam().torchs({truth});
  int num_calls = 0;
  const auto loss = optimizer->step([&] {
    ++num_calls;
    optimizer->zero_grad();
    const at::Tensor squared = (weight * weight).sum();
    squared.backward();
    return squared;
  });
  (truth * truth).sum().backward();
  oracle->step();
  EXPECT_EQ(num_calls, 1);
  EXPECT_DOUBLE_EQ(loss.item<double>(), 12.0);
  expect_close({weight}, {truth}, 1);
}

INSTANTIATE_TEST_SUITE_P(All, FusedTest, ::testing::ValuesIn(rules()),
                         [](const auto& instance) { return instance.param.name; });

// torch::optim would silently replace options of a wrong class by the defaults. Cadre's optimizers
// must throw.
template <typename O, typename Options, typename Other>
void expect_other_options_refused() {
  SCOPED_TRACE(c10::demangle_type<O>());
  const Tensors own = make_parameters(at::kFloat);
  const torch::optim::OptimizerParamGroup other({own[0]}, std::make_unique<Other>(0.5));
  const auto is_refusal = [](const std::function<void()>& call, const char* group) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.message(), ::testing::HasSubstr(group));
      EXPECT_THAT(error.message(), ::testing::HasSubstr("has the options of another optimizer"));
      return true;
    }
    return false;
  };
  const std::vector<torch::optim::OptimizerParamGroup> groups = {{{own[1]}}, other};
  EXPECT_TRUE(is_refusal([&] { O(groups, Options(kRate)); }, "parameter group 1"));
  O optimizer(Tensors{own[2]}, Options(kRate));
  EXPECT_TRUE(is_refusal([&] { optimizer.add_param_group(other); }, "parameter group 1"));
  EXPECT_EQ(optimizer.param_groups().size(), 1u);
  optimizer.add_param_group({{own[3]}, std::make_unique<Options>(0.5)});
  EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 0.5);
}

TEST(OptionsOfAnotherOptimizer, AreRefusedBeforeAStep) {
  using torch::optim::AdamOptions;
  using torch::optim::AdamWOptions;
  using torch::optim::SGDOptions;
  expect_other_options_refused<AdamW, AdamWOptions, AdamOptions>();
  expect_other_options_refused<Adam, AdamOptions, AdamWOptions>();
  expect_other_options_refused<SGD, SGDOptions, AdamWOptions>();
  expect_other_options_refused<Adagrad, torch::optim::AdagradOptions, SGDOptions>();
  expect_other_options_refused<Adadelta, AdadeltaOptions, SGDOptions>();
}

struct Moments {
  at::Tensor parameter, mean, square;
};

// Computes one step of Adam by its formula in double.
Moments formula(const Moments& before, const at::Tensor& gradient, int step, bool decoupled) {
  const double beta1 = 0.9, beta2 = 0.999, decay = 0.1;
  const at::Tensor kept = decoupled ? before.parameter * (1 - kRate * decay) : before.parameter;
  const at::Tensor g = decoupled ? gradient : gradient + decay * before.parameter;
  const at::Tensor mean = beta1 * before.mean + (1 - beta1) * g;
  const at::Tensor square = beta2 * before.square + (1 - beta2) * g * g;
  const at::Tensor divisor = (square / (1 - std::pow(beta2, step))).sqrt() + 1e-8;
  return {kept - kRate * mean / (1 - std::pow(beta1, step)) / divisor, mean, square};
}

// Expects that `halves` (bfloat16 or float16) differs from `exact` by at most one rounding to its
// dtype plus a float32 error.
void expect_rounded(const at::Tensor& halves, const at::Tensor& exact, const char* what) {
  const bool is_bfloat16 = halves.scalar_type() == at::kBFloat16;
  const double unit_roundoff = std::ldexp(1, is_bfloat16 ? -8 : -11);
  const double least = is_bfloat16 ? 0 : std::ldexp(1, -25);  // half of the smallest subnormal
  const at::Tensor allowed = exact.abs() * unit_roundoff * 1.01 + least * 1.01 + 1e-7;
  const at::Tensor error = (halves.to(at::kDouble) - exact).abs();
  EXPECT_TRUE((error <= allowed).all().item<bool>())
      << what << " of " << c10::toString(halves.scalar_type()) << ": "
      << (error / allowed).max().item<double>() << " times the bound";
}

template <typename Made, typename State, typename Options>
void expect_one_rounding_a_step(at::ScalarType dtype, bool decoupled) {
  torch::manual_seed(3);
  const at::Tensor parameter = torch::randn({301}).to(dtype).requires_grad_(true);
  Made optimizer(Tensors{parameter}, Options(kRate).weight_decay(0.1));
  const auto now = [&]() -> Moments {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    const at::Tensor value = parameter.detach().to(at::kDouble);
    if (found == optimizer.state().end()) {
      return {value, torch::zeros_like(value), torch::zeros_like(value)};
    }
    auto& state = static_cast<State&>(*found->second);
    EXPECT_EQ(state.exp_avg().scalar_type(), dtype);
    EXPECT_EQ(state.exp_avg_sq().scalar_type(), dtype);
    return {value, state.exp_avg().to(at::kDouble), state.exp_avg_sq().to(at::kDouble)};
  };
  for (int step = 1; step <= 20; ++step) {
    const at::Tensor gradient = torch::randn({301}).to(dtype);
    parameter.mutable_grad() = gradient;
    const Moments exact = formula(now(), gradient.to(at::kDouble), step, decoupled);
    optimizer.step();
    const auto& state = static_cast<State&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
    expect_rounded(parameter.detach(), exact.parameter, "parameter");
    expect_rounded(state.exp_avg(), exact.mean, "exp_avg");
    expect_rounded(state.exp_avg_sq(), exact.square, "exp_avg_sq");
  }
}

TEST(FusedHalfPrecision, EachStepOfAdamRoundsOnce) {
  using torch::optim::AdamOptions;
  using torch::optim::AdamParamState;
  using torch::optim::AdamWOptions;
  using torch::optim::AdamWParamState;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    expect_one_rounding_a_step<AdamW, AdamWParamState, AdamWOptions>(dtype, true);
    expect_one_rounding_a_step<Adam, AdamParamState, AdamOptions>(dtype, false);
  }
}

}  // namespace
}  // namespace cadre::optim_test
