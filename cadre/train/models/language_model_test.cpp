#include "cadre/train/models/language_model.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>

namespace cadre::train {
namespace {

constexpr int64_t kVocabulary = 11;

ModelConfig small_language_model(const std::string& kind) {
  ModelConfig config;
  config.kind = kind;
  config.layers = 2;
  config.heads = 2;
  config.width = 8;
  config.context = 6;
  config.window = 3;
  return config;
}

at::Tensor some_tokens() {
  return torch::tensor({{1, 5, 3, 0, 10, 2}, {4, 4, 9, 7, 8, 6}});
}

class EveryModel : public ::testing::TestWithParam<std::string> {};

TEST_P(EveryModel, DoesNotSeeTheFuture) {
  const auto model = make_language_model(small_language_model(GetParam()), kVocabulary, 1);
  const torch::NoGradGuard no_grad;
  const at::Tensor before = model->forward(some_tokens());
  EXPECT_EQ(before.sizes(), (at::IntArrayRef{2, 6, kVocabulary}));
  for (int64_t place = 0; place < 6; ++place) {
    at::Tensor changed = some_tokens();
    changed.select(1, place).fill_(0);
    changed.select(1, place).add_(some_tokens().select(1, place).eq(0));  // differs from before
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

INSTANTIATE_TEST_SUITE_P(All, EveryModel, ::testing::Values("gpt", "mlp"),
                         [](const auto& param) { return param.param; });

// The formula of the paper, written out with explicit masks and one head at a time.
at::Tensor gpt_by_formula(const std::map<std::string, at::Tensor>& p, const ModelConfig& config,
                          const at::Tensor& tokens) {
  const auto norm = [&](const at::Tensor& x, const std::string& name) {
    const at::Tensor centered = x - x.mean(-1, true);
    const at::Tensor variance = centered.square().mean(-1, true);
    return centered / (variance + 1e-5).sqrt() * p.at(name + ".weight") + p.at(name + ".bias");
  };
  const auto linear = [&](const at::Tensor& x, const std::string& name) {
    return x.matmul(p.at(name + ".weight").t()) + p.at(name + ".bias");
  };
  const int64_t length = tokens.size(1);
  const int64_t head_width = config.width / config.heads;
  const at::Tensor future = torch::ones({length, length}).triu(1).to(torch::kBool);
  at::Tensor x = p.at("wte.weight").index({tokens}) + p.at("wpe.weight").narrow(0, 0, length);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const std::string block = "h_" + std::to_string(layer);
    const at::Tensor qkv = linear(norm(x, block + ".ln_1"), block + ".attn_c_attn");
    std::vector<at::Tensor> heads;
    for (int64_t head = 0; head < config.heads; ++head) {
      const auto part = [&](int64_t which) {
        return qkv.narrow(2, which * config.width + head * head_width, head_width);
      };
      const at::Tensor scores = part(0).matmul(part(1).transpose(1, 2)) / std::sqrt(head_width);
      heads.push_back(scores.masked_fill(future, -INFINITY).softmax(-1).matmul(part(2)));
    }
    x = x + linear(torch::cat(heads, 2), block + ".attn_c_proj");
    const at::Tensor h = linear(norm(x, block + ".ln_2"), block + ".mlp_c_fc");
    const at::Tensor gelu =
        0.5 * h * (1 + torch::tanh(std::sqrt(2 / M_PI) * (h + 0.044715 * h.pow(3))));
    x = x + linear(gelu, block + ".mlp_c_proj");
  }
  return norm(x, "ln_f").matmul(p.at("wte.weight").t());
}

TEST(Gpt, IsTheFormula) {
  const ModelConfig config = small_language_model("gpt");
  const auto model = make_language_model(config, kVocabulary, 3);
  const torch::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> parameters;
  for (const auto& item : model->named_parameters()) {
    // Neither ones nor zeros, so that every parameter affects the output.
    item.value().add_(torch::randn_like(item.value()) * 0.3);
    parameters[item.key()] = item.value();
  }
  const at::Tensor expected = gpt_by_formula(parameters, config, some_tokens());
  EXPECT_TRUE(model->forward(some_tokens()).allclose(expected, 1e-4, 1e-4));
}

TEST(Gpt, HasTheParametersOfItsShape) {
  ModelConfig config;
  config.layers = 3;
  config.width = 64;
  config.context = 32;
  const int64_t block = 12 * 64 * 64 + 13 * 64;
  EXPECT_EQ(num_parameters(*make_language_model(config, 257, 0)),
            (257 + 32) * 64 + 3 * block + 2 * 64);
}

TEST(Gpt, AnUntiedHeadHasAWeightOfItsOwn) {
  ModelConfig config = small_language_model("gpt");
  const auto tied = make_language_model(config, kVocabulary, 3);
  config.tied = false;
  const auto untied = make_language_model(config, kVocabulary, 3);
  const int64_t weight = kVocabulary * config.width;
  EXPECT_EQ(num_parameters(*untied), num_parameters(*tied) + weight);
  const auto parameters = untied->named_parameters();
  EXPECT_TRUE(parameters["wte.weight"].equal(tied->named_parameters()["wte.weight"]));
  const torch::NoGradGuard no_grad;
  parameters["lm_head.weight"].copy_(parameters["wte.weight"]);
  EXPECT_TRUE(untied->forward(some_tokens()).equal(tied->forward(some_tokens())));
  parameters["lm_head.weight"].zero_();
  EXPECT_EQ(untied->forward(some_tokens()).abs().max().item<double>(), 0);
}

// As the processes of a run have the rows of a batch: every second one.
TEST(Gpt, DropoutDependsOnTheSampleAlone) {
  ModelConfig config = small_language_model("gpt");
  config.dropout_rate = 0.3;
  const auto model = make_language_model(config, kVocabulary, 3);
  const torch::NoGradGuard no_grad;
  const at::Tensor tokens = some_tokens()[0].expand({4, -1});
  model->set_rows({.step = 2, .first = 0, .stride = 1});
  const at::Tensor whole = model->forward(tokens);
  EXPECT_FALSE(whole[0].allclose(whole[1]));
  model->set_rows({.step = 2, .first = 1, .stride = 2});
  const at::Tensor odd = model->forward(tokens.slice(0, 0, 2));
  EXPECT_TRUE(odd[0].allclose(whole[1]));
  EXPECT_TRUE(odd[1].allclose(whole[3]));
  model->set_rows({.step = 3, .first = 0, .stride = 1});
  EXPECT_FALSE(model->forward(tokens).allclose(whole));
  model->eval();
  EXPECT_TRUE(model->forward(tokens)[0].equal(model->forward(tokens)[1]));
}

TEST(NextTokenLoss, OfNothingIsNothing) {
  const at::Tensor logits = torch::zeros({0, 4, 5}).requires_grad_(true);
  const at::Tensor loss = next_token_loss(logits, torch::zeros({0, 4}, torch::kLong));
  loss.backward();
  EXPECT_EQ(loss.item<double>(), 0);
}

}  // namespace
}  // namespace cadre::train
