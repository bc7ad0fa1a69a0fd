// Tests tied parameters: two tensors over the same memory, a tensor that is listed several times,
// and one in two groups. The reference is torch::optim where it supports the case.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "cadre/testing/torch/optimizer_rules.h"

namespace cadre::optim_test {
namespace {

using ::testing::HasSubstr;

class TiedTest : public ::testing::TestWithParam<Rule> {
 protected:
  TiedTest() { at::set_num_threads(1); }
};

// Returns two tensors that share all or a part of `memory`, and between them a third one with
// memory of its own.
Tensors over_one_memory(const at::Tensor& memory, int64_t begin) {
  const auto part = [&](int64_t from, int64_t to) {
    return memory.slice(0, from, to).detach().requires_grad_(true);
  };
  const int64_t numel = memory.numel();
  return {part(0, numel - begin), torch::ones({5}, at::kDouble).requires_grad_(true),
          part(begin, numel)};
}

// Parameters that share memory must be updated one after the other, including their last elements,
// which are updated in padded copies (PaddedBatch).
TEST_P(TiedTest, ParametersThatShareMemoryStepOneAfterTheOther) {
  for (const int64_t numel : {3, 8, 19, 35, 200}) {
    for (const int64_t begin : {int64_t{0}, int64_t{1}, numel - 1}) {
      torch::manual_seed(numel);
      const at::Tensor memory = torch::randn({numel}, at::kDouble);
      const at::Tensor truth = memory.clone();
      const Tensors own = over_one_memory(memory, begin);
      const Tensors others = over_one_memory(truth, begin);
      // The optimizer updates several tensors with one call of a kernel. Three empty parameters
      // come first, so that all other tensors belong to the same call.
      const auto with_first = [](Tensors tensors) {
        const at::Tensor empty = torch::empty({0}, at::kDouble).requires_grad_(true);
        tensors.insert(tensors.begin(), {empty, empty, empty});
        return tensors;
      };
      const auto optimizer = GetParam().ours(with_first(own));
      const auto oracle = GetParam().torchs(with_first(others));
      for (int step = 0; step < 6; ++step) {
        for (size_t i = 0; i < own.size(); ++i) {
          own[i].mutable_grad() = torch::randn(own[i].sizes(), at::kDouble);
          others[i].mutable_grad() = own[i].grad().clone();
        }
        optimizer->step();
        oracle->step();
      }
      EXPECT_LE((memory - truth).abs().max().item<double>(), bound(truth, 12))
          << numel << " elements, shared from " << begin;
    }
  }
}

// A parameter that is listed twice must continue with its saved state. torch::load() moves the
// loaded state once for each listing of the parameter, and the second move would leave an empty
// state.
TEST_P(TiedTest, OneThatIsListedTwiceGoesOnAfterALoad) {
  const at::Tensor own = torch::ones({7}, at::kDouble).requires_grad_(true);
  const at::Tensor again = own.detach().clone().requires_grad_(true);
  const auto listed = [](const at::Tensor& tensor) {
    const at::Tensor other = torch::ones({3}, at::kDouble).requires_grad_(true);
    return Tensors{tensor, tensor, other, tensor};  // `tensor` is in both groups
  };
  const auto optimizer = GetParam().ours(listed(own));
  const auto resumed = GetParam().ours(listed(again));
  const auto set_gradients = [&](int step) {
    own.mutable_grad() = torch::linspace(-1, step, 7, at::kDouble);
    again.mutable_grad() = own.grad().clone();
  };
  for (int step = 0; step < 4; ++step) {
    set_gradients(step);
    optimizer->step();
  }
  std::stringstream file;
  torch::save(*optimizer, file);
  torch::load(*resumed, file);
  for (const auto& group : resumed->param_groups()) {
    for (const at::Tensor& listed_one : group.params()) {
      EXPECT_TRUE(listed_one.is_same(again) || listed_one.numel() == 3)
          << "loading keeps the lists";
    }
  }
  again.detach().copy_(own.detach());
  for (int step = 4; step < 8; ++step) {
    set_gradients(step);
    optimizer->step();
    resumed->step();
  }
  EXPECT_TRUE(own.equal(again)) << own << again;
  EXPECT_EQ(resumed->state().size(), optimizer->state().size());
}

INSTANTIATE_TEST_SUITE_P(All, TiedTest, ::testing::ValuesIn(rules()),
                         [](const auto& instance) { return instance.param.name; });

// The saved optimizer lists one tensor twice; the loading optimizer has two different tensors. The
// file has only one state for both, so loading must throw.
TEST(TiedParameter, AStateThatTheFileHasForAnotherOneOnlyIsRefused) {
  const auto make = [] {
    const at::Tensor made = torch::ones({4}).requires_grad_(true);
    made.mutable_grad() = torch::ones({4});
    return made;
  };
  const at::Tensor tied = make();
  AdamW saved(Tensors{tied, tied}, torch::optim::AdamWOptions(kRate));
  saved.step();
  std::stringstream file;
  torch::save(saved, file);
  const Tensors apart = {make(), make()};
  AdamW optimizer(apart, torch::optim::AdamWOptions(kRate));
  std::string refused;
  try {
    torch::load(optimizer, file);
  } catch (const Error& error) {
    refused = error.message();
  }
  EXPECT_THAT(refused, HasSubstr("the state of parameter 1 is empty, as torch::load leaves it"));
  EXPECT_TRUE(optimizer.state().empty());
  EXPECT_TRUE(apart[0].equal(torch::ones({4}))) << "nothing is changed";
}

// The parameter is in two groups. The first group (without amsgrad) would create a state without
// max_exp_avg_sq, which the second group (with amsgrad) needs, so the step must throw.
TEST(TiedParameter, InTwoGroupsOfWhichTheSecondNeedsMoreState) {
  using torch::optim::AdamWOptions;
  const at::Tensor tied = torch::ones({4}).requires_grad_(true);
  tied.mutable_grad() = torch::ones({4});
  const auto groups = [&](bool first, bool second) {
    std::vector<torch::optim::OptimizerParamGroup> made;
    for (const bool amsgrad : {first, second}) {
      made.emplace_back(Tensors{tied},
                        std::make_unique<AdamWOptions>(AdamWOptions(kRate).amsgrad(amsgrad)));
    }
    return made;
  };
  AdamW wrong(groups(false, true), AdamWOptions(kRate));
  EXPECT_THAT(refusal(wrong), HasSubstr("parameter 1 is also in an earlier parameter group, whose "
                                        "options make a state without max_exp_avg_sq"));
  EXPECT_TRUE(tied.equal(torch::ones({4}))) << "nothing is changed";
  EXPECT_TRUE(wrong.state().empty());
  AdamW right(groups(true, false), AdamWOptions(kRate));
  EXPECT_EQ(refusal(right), "");

  using torch::optim::SGDOptions;
  std::vector<torch::optim::OptimizerParamGroup> made;
  for (const double momentum : {0.0, 0.9}) {
    made.emplace_back(Tensors{tied},
                      std::make_unique<SGDOptions>(SGDOptions(kRate).momentum(momentum)));
  }
  SGD sgd(made, SGDOptions(kRate));
  EXPECT_EQ(refusal(sgd), "") << "the first group makes no state";
}

}  // namespace
}  // namespace cadre::optim_test
