// Tests torch::load into an optimizer that has already made steps. It must load the whole state, or
// throw an error that names the problem and leave the optimizer unchanged.
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>
#include <string>

#include "cadre/tensor/optim/offloaded_optimizer.h"
#include "cadre/testing/torch/optimizer_rules.h"

namespace cadre::optim_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;

struct Trained {
  explicit Trained(const AdamWOptions& options = AdamWOptions(kRate))
      : optimizer(named(), options) {
    step(1);
  }
  NamedParameters named() const {
    NamedParameters parameters;
    parameters.insert("first", first);
    parameters.insert("second", second);
    return parameters;
  }
  void step(double gradient) {
    first.mutable_grad() = torch::full({3}, gradient);
    second.mutable_grad() = torch::full({2}, -gradient);
    optimizer.step();
  }
  AdamWParamState& state_of(const at::Tensor& parameter) {
    return static_cast<AdamWParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
  }

  at::Tensor first = torch::ones({3}).requires_grad_(true);
  at::Tensor second = torch::ones({2}).requires_grad_(true);
  AdamW optimizer;
};

// Saves a state that `change` has damaged, loads it into an optimizer that has made a step, and
// returns the error. The optimizer must then behave as its twin, which has not tried to load.
std::string loading(const std::function<void(Trained&)>& change) {
  Trained saved;
  change(saved);
  std::stringstream file;
  torch::save(saved.optimizer, file);
  Trained running;
  Trained twin;
  std::string refused;
  try {
    torch::load(running.optimizer, file);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    refused = error.message();
  }
  EXPECT_NE(refused, "");
  running.step(0.5);
  twin.step(0.5);
  EXPECT_TRUE(running.first.equal(twin.first)) << refused;
  EXPECT_TRUE(running.second.equal(twin.second)) << refused;
  return refused;
}

TEST(OptimizerLoading, AStateWithoutATensorIsRefusedByName) {
  EXPECT_THAT(loading([](Trained& saved) { saved.state_of(saved.second).exp_avg(at::Tensor()); }),
              HasSubstr("cadre::AdamW: the state of parameter 1 (second) has no exp_avg"));
  EXPECT_THAT(loading([](Trained& saved) { saved.state_of(saved.first).exp_avg_sq(at::Tensor()); }),
              HasSubstr("the state of parameter 0 (first) has no exp_avg_sq"));
}

TEST(OptimizerLoading, AStateOfOtherSizesOrAnotherDtypeIsRefusedByName) {
  EXPECT_THAT(
      loading([](Trained& saved) { saved.state_of(saved.first).exp_avg(torch::zeros({4})); }),
      AllOf(HasSubstr("the state exp_avg of parameter 0 (first)"), HasSubstr("Float (4)")));
  EXPECT_THAT(loading([](Trained& saved) {
                saved.state_of(saved.first).exp_avg_sq(torch::zeros({3}, torch::kDouble));
              }),
              AllOf(HasSubstr("exp_avg_sq of parameter 0"), HasSubstr("Double (3)")));
  EXPECT_THAT(loading([](Trained& saved) { saved.state_of(saved.first).step(-3); }),
              HasSubstr("counts -3 steps"));
}

TEST(OptimizerLoading, ATensorThatTheOptionsDoNotUseIsRefusedByName) {
  EXPECT_THAT(loading([](Trained& saved) {
                saved.state_of(saved.first).max_exp_avg_sq(torch::zeros({3}));
              }),
              HasSubstr("the state of parameter 0 (first) has a max_exp_avg_sq, which"));
}

TEST(OptimizerLoading, AnArchiveOfAnotherOptimizerIsRefused) {
  const at::Tensor alone = torch::ones({3}).requires_grad_(true);
  alone.mutable_grad() = torch::ones({3});
  SGD sgd(Tensors{alone, torch::ones({2}).requires_grad_(true)},
          torch::optim::SGDOptions(kRate).momentum(0.9));
  AdamW fewer(Tensors{alone}, AdamWOptions(kRate));
  sgd.step();
  fewer.step();
  for (torch::optim::Optimizer* const other : {static_cast<torch::optim::Optimizer*>(&sgd),
                                               static_cast<torch::optim::Optimizer*>(&fewer)}) {
    std::stringstream file;
    torch::save(*other, file);
    Trained running;
    EXPECT_THROW(torch::load(running.optimizer, file), Error);
    EXPECT_EQ(running.optimizer.state().size(), 2U);
    EXPECT_EQ(running.state_of(running.first).step(), 1);
  }
}

// A parameter that has no state in the file must have none after loading, even if it had one
// before.
TEST(OptimizerLoading, AStateOfBeforeIsNotMixedWithTheLoadedOne) {
  Trained saved;
  saved.optimizer.state().erase(saved.second.unsafeGetTensorImpl());
  std::stringstream file;
  torch::save(saved.optimizer, file);
  Trained running;
  running.step(1);
  torch::load(running.optimizer, file);
  EXPECT_EQ(running.optimizer.state().size(), 1U);
  EXPECT_EQ(running.state_of(running.first).step(), 1);
}

TEST(OptimizerLoading, OffloadedOptimizersRefuseTheSame) {
  using Offloaded = OffloadedOptimizer<torch::optim::RMSprop>;
  const auto make = [](const at::Tensor& parameter) {
    return Offloaded(Tensors{parameter}, torch::optim::RMSpropOptions(kRate));
  };
  const at::Tensor parameter = torch::ones({3}).requires_grad_(true);
  parameter.mutable_grad() = torch::ones({3});
  Offloaded saved = make(parameter);
  saved.step();
  auto& state = static_cast<torch::optim::RMSpropParamState&>(
      *saved.state().at(parameter.unsafeGetTensorImpl()));
  state.square_avg(torch::zeros({2}));
  std::stringstream file;
  torch::save(saved, file);
  Offloaded running = make(parameter);
  running.step();
  std::string refused;
  try {
    torch::load(running, file);
  } catch (const Error& error) {
    refused = error.message();
  }
  EXPECT_THAT(refused, HasSubstr("the state square_avg of parameter 0 is dense Float (2)"));
  running.step();
}

// A step in inference mode creates the state, and the next step, outside of that mode, must be able
// to use it.
TEST(OptimizerModes, AStepInInferenceModeIsAStep) {
  Trained inside;
  Trained outside;
  inside.optimizer.state().clear();
  outside.optimizer.state().clear();
  {
    const c10::InferenceMode mode;
    inside.optimizer.step();
  }
  outside.optimizer.step();
  inside.step(0.5);
  outside.step(0.5);
  EXPECT_TRUE(inside.first.equal(outside.first));
  EXPECT_TRUE(inside.second.equal(outside.second));
}

TEST(OptimizerModes, AClosureInInferenceModeIsRefusedByItsReason) {
  Trained trained;
  const at::Tensor before = trained.first.detach().clone();
  const auto closure = [&] {
    trained.optimizer.zero_grad();
    const at::Tensor loss = (trained.first.sum() + trained.second.sum()).square();
    loss.backward();
    return loss;
  };
  const c10::InferenceMode mode;
  std::string refused;
  try {
    trained.optimizer.step(closure);
  } catch (const Error& error) {
    refused = error.message();
  }
  EXPECT_THAT(refused, HasSubstr("cadre::AdamW: step(closure) was called in inference mode"));
  EXPECT_TRUE(trained.first.equal(before));
}

}  // namespace
}  // namespace cadre::optim_test
