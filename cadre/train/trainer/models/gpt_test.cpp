// Compares the GPT with a direct implementation of its formula.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <optional>

#include "cadre/testing/torch/ep_reference.h"
#include "cadre/testing/torch/small_language_model.h"
#include "cadre/train/trainer/models/language_model.h"

namespace cadre::train {
namespace {

using testing::kVocabulary;
using testing::small_language_model;
using testing::some_tokens;

// Computes the experts of a block token by token; adds the block's load-balancing loss to
// load_balance.
at::Tensor experts_by_formula(const std::map<std::string, at::Tensor>& p, const std::string& name,
                              const ModelConfig& config, const at::Tensor& x,
                              at::Tensor& load_balance) {
  const at::Tensor& up = p.at(name + ".up_weight");
  const at::Tensor& down = p.at(name + ".down_weight");
  const testing::ExpertReference reference = testing::reference_of(
      {.router = p.at(name + ".router.weight"),
       .up_weight = up,
       .up_bias = torch::zeros({config.experts, up.size(1)}),
       .down_weight = down,
       .down_bias = torch::zeros({config.experts, down.size(1)})},
      x.flatten(0, 1),
      {.features = config.width,
       .hidden_features = 4 * config.width,
       .num_experts = config.experts,
       .num_selected = config.experts_per_token,
       .normalize_weights = config.experts_per_token > 1,
       .capacity_factor =
           config.capacity_factor > 0 ? std::optional(config.capacity_factor) : std::nullopt});
  // If there is a capacity, it drops some of the tokens' choices of experts.
  EXPECT_EQ(reference.num_dropped > 0, config.capacity_factor > 0);
  load_balance = load_balance + reference.load_balance;
  return reference.values.view(x.sizes());
}

// Computes the model as the paper describes it, with explicit masks and one head at a time. Adds
// the load-balancing losses of all blocks to load_balance.
at::Tensor gpt_by_formula(const std::map<std::string, at::Tensor>& p, const ModelConfig& config,
                          const at::Tensor& tokens, at::Tensor& load_balance) {
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
    if (config.experts > 0) {
      x = x + experts_by_formula(p, block + ".mlp_experts", config, norm(x, block + ".ln_2"),
                                 load_balance);
      continue;
    }
    const at::Tensor h = linear(norm(x, block + ".ln_2"), block + ".mlp_c_fc");
    const at::Tensor gelu =
        0.5 * h * (1 + torch::tanh(std::sqrt(2 / M_PI) * (h + 0.044715 * h.pow(3))));
    x = x + linear(gelu, block + ".mlp_c_proj");
  }
  return norm(x, "ln_f").matmul(p.at("wte.weight").t());
}

void expect_formula(const ModelConfig& config) {
  const auto model = make_language_model(config, kVocabulary, 3);
  const torch::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> parameters;
  for (const auto& item : model->named_parameters()) {
    // Random values are added, so that no parameter is 0 or 1 and each one affects the output.
    item.value().add_(torch::randn_like(item.value()) * 0.3);
    parameters[item.key()] = item.value();
  }
  at::Tensor load_balance = torch::zeros({});
  const at::Tensor expected = gpt_by_formula(parameters, config, some_tokens(), load_balance);
  EXPECT_TRUE(model->forward(some_tokens()).allclose(expected, 1e-4, 1e-4));
  const at::Tensor auxiliary = model->take_auxiliary_loss();
  const bool has_auxiliary = config.experts > 0 && config.auxiliary_loss > 0;
  ASSERT_EQ(auxiliary.defined(), has_auxiliary);
  if (!has_auxiliary) return;
  EXPECT_GT(load_balance.item<double>(), 0);
  EXPECT_NEAR(auxiliary.item<double>(), config.auxiliary_loss * load_balance.item<double>(), 1e-4);
  EXPECT_FALSE(model->take_auxiliary_loss().defined())
      << "a second call must return an undefined tensor";
}

TEST(Gpt, IsTheFormula) {
  expect_formula(small_language_model("gpt"));
}

TEST(Gpt, WithExpertsIsTheFormula) {
  ModelConfig config = small_language_model("experts");
  config.auxiliary_loss = 0.5;
  for (const int64_t count : {1, 2, 3}) {
    SCOPED_TRACE(count);
    config.experts_per_token = count;
    expect_formula(config);
  }
  config.auxiliary_loss = 0;
  expect_formula(config);
  config.capacity_factor = 0.75;
  expect_formula(config);
}

// The capacity is limited only in training. In an evaluation, the output of a sample must not
// depend on the other samples of the batch.
TEST(Gpt, ACapacityIsOneOfTraining) {
  ModelConfig config = small_language_model("experts");
  const auto unlimited = make_language_model(config, kVocabulary, 3);
  config.capacity_factor = 0.5;
  const auto limited = make_language_model(config, kVocabulary, 3);
  const torch::NoGradGuard no_grad;
  for (const bool is_training : {true, false, true}) {
    unlimited->train(is_training);
    limited->train(is_training);
    EXPECT_EQ(limited->forward(some_tokens()).equal(unlimited->forward(some_tokens())),
              !is_training);
  }
}

// The gradient of the loss reaches every parameter; the gradient of the auxiliary loss reaches the
// routers.
TEST(Gpt, RoutersLearnFromBothLosses) {
  ModelConfig config = small_language_model("experts");
  config.experts_per_token = 1;
  const auto model = make_language_model(config, kVocabulary, 3);
  const auto norm_of_router = [&] {
    return model->named_parameters()["h_0.mlp_experts.router.weight"].grad().norm().item<double>();
  };
  next_token_loss(model->forward(some_tokens()), some_tokens().roll(-1, 1)).backward();
  EXPECT_GT(norm_of_router(), 0);
  for (const auto& parameter : model->named_parameters()) {
    EXPECT_TRUE(parameter.value().grad().defined()) << parameter.key();
  }
  model->zero_grad();
  (void)model->forward(some_tokens());
  model->take_auxiliary_loss().backward();
  EXPECT_GT(norm_of_router(), 0);
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

// Two processes have the even and the odd rows of a batch. Their outputs must equal those rows of
// the output for the whole batch, dropout included.
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

}  // namespace
}  // namespace cadre::train
