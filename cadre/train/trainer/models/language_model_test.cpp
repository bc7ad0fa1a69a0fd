#include "cadre/train/trainer/models/language_model.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <string>

#include "cadre/testing/torch/small_language_model.h"

namespace cadre::train {
namespace {

using testing::kVocabulary;
using testing::small_language_model;
using testing::some_tokens;

class EveryModel : public ::testing::TestWithParam<std::string> {
 protected:
  EveryModel() { at::set_num_threads(1); }  // one thread is enough for these small models
};

TEST_P(EveryModel, DoesNotSeeTheFuture) {
  const auto model = make_language_model(small_language_model(GetParam()), kVocabulary, 1);
  const torch::NoGradGuard no_grad;
  const at::Tensor before = model->forward(some_tokens());
  EXPECT_EQ(before.sizes(), (at::IntArrayRef{2, 6, kVocabulary}));
  for (int64_t place = 0; place < 6; ++place) {
    at::Tensor changed = some_tokens();
    changed.select(1, place).fill_(0);
    // Changes all tokens at one position: a 0 becomes 1, and any other token becomes 0.
    changed.select(1, place).add_(some_tokens().select(1, place).eq(0));
    const at::Tensor after = model->forward(changed);
    EXPECT_TRUE(after.narrow(1, 0, place).allclose(before.narrow(1, 0, place))) << place;
    EXPECT_FALSE(after.select(1, place).allclose(before.select(1, place), 1e-5, 1e-6)) << place;
  }
}

TEST_P(EveryModel, StartsWithoutAnOpinionAndLearnsOneBatch) {
  const auto model = make_language_model(small_language_model(GetParam()), kVocabulary, 1);
  torch::optim::Adam optimizer(model->parameters(), 0.01);
  const at::Tensor tokens = some_tokens();
  const at::Tensor targets = tokens.roll(-1, 1);
  double loss = 0;
  for (int step = 0; step < 150; ++step) {
    optimizer.zero_grad();
    const at::Tensor value = next_token_loss(model->forward(tokens), targets);
    if (step == 0) {
      EXPECT_NEAR(value.item<double>(), std::log(kVocabulary), 0.9);
    }
    value.backward();
    optimizer.step();
    loss = value.item<double>();
  }
  EXPECT_LT(loss, 0.1);
}

TEST_P(EveryModel, DependsOnTheSeedAlone) {
  const auto a = make_language_model(small_language_model(GetParam()), kVocabulary, 7);
  torch::rand({3});
  const auto b = make_language_model(small_language_model(GetParam()), kVocabulary, 7);
  const auto c = make_language_model(small_language_model(GetParam()), kVocabulary, 8);
  for (size_t i = 0; i < a->parameters().size(); ++i) {
    EXPECT_TRUE(a->parameters()[i].equal(b->parameters()[i]));
  }
  EXPECT_FALSE(a->parameters()[0].equal(c->parameters()[0]));
}

INSTANTIATE_TEST_SUITE_P(All, EveryModel, ::testing::Values("gpt", "experts", "mlp"),
                         [](const auto& param) { return param.param; });

TEST(NextTokenLoss, OfNothingIsNothing) {
  const at::Tensor logits = torch::zeros({0, 4, 5}).requires_grad_(true);
  const at::Tensor loss = next_token_loss(logits, torch::zeros({0, 4}, torch::kLong));
  loss.backward();
  EXPECT_EQ(loss.item<double>(), 0);
}

}  // namespace
}  // namespace cadre::train
