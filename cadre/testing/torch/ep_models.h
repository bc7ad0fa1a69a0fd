// The models of the equality tests of expert parallelism: a GPT whose MLPs are mixtures of experts,
// and an MLP whose middle layer is a mixture with one selected expert for each token (top-1) and a
// capacity at which tokens are dropped.
//
// Threads: one for each model. Blocking: like the layers, once they are divided.
#pragma once

#include <torch/nn.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>

#include "cadre/parallel/ep/expert_parallel.h"
#include "cadre/parallel/ep/mixture_of_experts.h"
#include "cadre/testing/torch/wrap_models.h"

namespace cadre::testing {

struct Degrees {
  int dp;
  int ep;
};

// A model whose loss() is the mean over the tokens of all ranks plus the auxiliary losses of the
// last forward.
struct ExpertModel : Model {
  // Null if the model trains in one process.
  const ExpertParallel* experts = nullptr;

 protected:
  Tensor mean(const Tensor& sum, int64_t count) const {
    return experts == nullptr ? sum / count : experts->mean_over_tokens(sum, count);
  }
  Tensor weighted_losses() const { return losses_.weighted({.load_balance = 0.1, .z = 0.02}); }
  void clear_losses() { losses_ = {}; }
  Tensor values_of(MixtureOfExpertsOutput output) {
    losses_ += output.losses;
    return output.values;
  }

 private:
  RouterLosses losses_;
};

struct ExpertMlp : ExpertModel {
  ExpertMlp() {
    first = register_module("first", nn::Linear(12, 10));
    middle = register_module(
        "middle", MixtureOfExperts(MixtureOfExpertsOptions{.features = 10,
                                                           .hidden_features = 9,
                                                           .num_experts = 8,
                                                           .num_selected = 1,
                                                           .normalize_weights = false,
                                                           .capacity_factor = 1.0,
                                                           .activation = ExpertActivation::kSilu}));
    last = register_module("last", nn::Linear(10, 3));
  }
  Tensor forward(const Tensor& x) override {
    clear_losses();
    const Tensor h = torch::tanh(first(x));
    return last(h + values_of(middle(h)));
  }
  Tensor loss(const Tensor& output, const Tensor& x) override {
    return mean((output - x.narrow(1, 0, 3)).pow(2).mean(1).sum(), x.size(0)) + weighted_losses();
  }
  Tensor make_batch(int64_t rows) override {
    return torch::randn({rows, 12}, first->weight.dtype());
  }
  nn::Linear first{nullptr}, last{nullptr};
  MixtureOfExperts middle{nullptr};
};

struct ExpertBlockImpl : nn::Module {
  explicit ExpertBlockImpl(int64_t width) {
    norm_1 = register_module("norm_1", nn::LayerNorm(nn::LayerNormOptions({width})));
    qkv = register_module("qkv", nn::Linear(width, 3 * width));
    project = register_module("project", nn::Linear(width, width));
    norm_2 = register_module("norm_2", nn::LayerNorm(nn::LayerNormOptions({width})));
    experts = register_module(
        "experts", MixtureOfExperts(MixtureOfExpertsOptions{
                       .features = width, .hidden_features = 2 * width, .num_experts = 12}));
  }
  MixtureOfExpertsOutput forward(const Tensor& x) {
    const auto parts = qkv(norm_1(x)).chunk(3, -1);
    const Tensor h = x + project(torch::scaled_dot_product_attention(parts[0], parts[1], parts[2],
                                                                     {}, 0.0, /*is_causal=*/true));
    MixtureOfExpertsOutput output = experts(norm_2(h));
    output.values = h + output.values;
    return output;
  }
  nn::LayerNorm norm_1{nullptr}, norm_2{nullptr};
  nn::Linear qkv{nullptr}, project{nullptr};
  MixtureOfExperts experts{nullptr};
};
TORCH_MODULE(ExpertBlock);

struct ExpertGpt : ExpertModel {
  static constexpr int64_t kWidth = 8;
  ExpertGpt() {
    tokens = register_module("tokens", nn::Embedding(kVocabulary, kWidth));
    positions = register_module("positions", nn::Embedding(kContext, kWidth));
    first = register_module("first", ExpertBlock(kWidth));
    second = register_module("second", ExpertBlock(kWidth));
    head = register_module("head", nn::Linear(nn::LinearOptions(kWidth, kVocabulary).bias(false)));
  }
  Tensor forward(const Tensor& x) override {
    clear_losses();
    const Tensor h = tokens(x) + positions(torch::arange(x.size(1), x.device()));
    return head(values_of(second(values_of(first(h)))));
  }
  Tensor loss(const Tensor& output, const Tensor& x) override {
    const auto options = nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum);
    return mean(nn::functional::cross_entropy(output.reshape({-1, kVocabulary}),
                                              x.roll(-1, 1).reshape({-1}), options),
                x.numel()) +
           weighted_losses();
  }
  Tensor make_batch(int64_t rows) override {
    return torch::randint(kVocabulary, {rows, kContext}, torch::kLong);
  }
  nn::Embedding tokens{nullptr}, positions{nullptr};
  ExpertBlock first{nullptr}, second{nullptr};
  nn::Linear head{nullptr};
};

// Makes the model that `test_case.model` names: "mlp" or "gpt".
inline std::shared_ptr<ExpertModel> make_expert_model(const Case& test_case, uint64_t seed) {
  torch::manual_seed(seed);
  std::shared_ptr<ExpertModel> model;
  if (test_case.model == "mlp") {
    model = std::make_shared<ExpertMlp>();
  } else {
    model = std::make_shared<ExpertGpt>();
  }
  model->to(test_case.dtype);
  return model;
}

}  // namespace cadre::testing
