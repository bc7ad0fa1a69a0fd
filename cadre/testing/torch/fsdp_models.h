// The models of wrap_models.h, divided into units (modules whose parameters are gathered together),
// and more models for tests of units. The same seed gives the same parameters in the same order.
//
// Threads: one for each model. Blocking: never.
#pragma once

#include <torch/nn.h>

#include <memory>

#include "cadre/parallel/fsdp/shard_unit.h"
#include "cadre/tensor/hooks/activations/activation_checkpoint.h"
#include "cadre/testing/torch/wrap_training.h"

namespace cadre::testing {

using LinearUnit = nn::ModuleHolder<ShardUnit<nn::LinearImpl>>;
using ConvUnit = nn::ModuleHolder<ShardUnit<nn::Conv2dImpl>>;

// The models below have a template parameter Unit, which is one of these templates: a plain unit,
// or a unit with activation checkpointing.
template <typename M>
using PlainShardUnit = ShardUnit<M>;
template <typename M>
using CheckpointedUnit = ShardUnit<ActivationCheckpoint<M>>;

template <template <typename> typename Unit>
struct MlpOfUnits : Mlp {
  using Layer = nn::ModuleHolder<Unit<nn::LinearImpl>>;
  MlpOfUnits() {
    layers = replace_module("layers", nn::Sequential(Layer(12, 24), nn::Tanh(), Layer(24, 16),
                                                     nn::Tanh(), Layer(16, 3)));
  }
};
using UnitMlp = MlpOfUnits<PlainShardUnit>;

// A CNN with two consecutive units, and with two layers that belong to the root.
template <template <typename> typename Unit>
struct CnnOfUnits : TinyCnn {
  explicit CnnOfUnits(torch::ScalarType dtype) : TinyCnn(dtype) {
    unit1 = std::make_shared<Unit<nn::Conv2dImpl>>(nn::Conv2dOptions(1, 4, 3));
    unit2 = std::make_shared<Unit<nn::Conv2dImpl>>(nn::Conv2dOptions(4, 6, 3));
    replace_module("conv1", unit1);
    replace_module("conv2", unit2);
    conv1 = nn::Conv2d(std::static_pointer_cast<nn::Conv2dImpl>(unit1));
    conv2 = nn::Conv2d(std::static_pointer_cast<nn::Conv2dImpl>(unit2));
  }
  Tensor forward(const Tensor& x) override {
    Tensor h = activate(unit2->forward(activate(unit1->forward(x))));
    h = is_smooth ? torch::avg_pool2d(h, 2) : torch::max_pool2d(h, 2);
    return torch::log_softmax(fc2(activate(fc1(h.flatten(1)))), 1);
  }
  std::shared_ptr<Unit<nn::Conv2dImpl>> unit1, unit2;
};
using UnitCnn = CnnOfUnits<PlainShardUnit>;

// The two halves of the block of TinyGpt, as units that take and return the residual stream.
struct AttentionImpl : nn::Module {
  explicit AttentionImpl(int64_t width) {
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    qkv = register_module("qkv", nn::Linear(width, 3 * width));
    project = register_module("project", nn::Linear(width, width));
  }
  Tensor forward(const Tensor& h) {
    const auto parts = qkv(norm(h)).chunk(3, -1);
    return h + project(torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0,
                                                           /*is_causal=*/true));
  }
  nn::LayerNorm norm{nullptr};
  nn::Linear qkv{nullptr}, project{nullptr};
};

struct FeedForwardImpl : nn::Module {
  explicit FeedForwardImpl(int64_t width) {
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    up = register_module("up", nn::Linear(width, 4 * width));
    down = register_module("down", nn::Linear(4 * width, width));
  }
  Tensor forward(const Tensor& h) { return h + down(torch::gelu(up(norm(h)))); }
  nn::LayerNorm norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
};

template <template <typename> typename Unit>
struct GptOfUnits : Model {
  GptOfUnits() {
    constexpr int64_t kWidth = 8;
    tokens = register_module("tokens", nn::Embedding(kVocabulary, kWidth));
    positions = register_module("positions", nn::Embedding(kContext, kWidth));
    attention = register_module("attention", nn::ModuleHolder<Unit<AttentionImpl>>(kWidth));
    feed_forward = register_module("feed_forward", nn::ModuleHolder<Unit<FeedForwardImpl>>(kWidth));
  }
  Tensor forward(const Tensor& x) override {
    const Tensor h = tokens(x) + positions(torch::arange(x.size(1)));
    return torch::matmul(feed_forward(attention(h)), tokens->weight.t());
  }
  Tensor loss(const Tensor& output, const Tensor& x) override {
    return nn::functional::cross_entropy(output.reshape({-1, kVocabulary}),
                                         x.roll(-1, 1).reshape({-1}));
  }
  Tensor make_batch(int64_t rows) override {
    return torch::randint(kVocabulary, {rows, kContext}, torch::kLong);
  }
  nn::Embedding tokens{nullptr}, positions{nullptr};
  nn::ModuleHolder<Unit<AttentionImpl>> attention{nullptr};
  nn::ModuleHolder<Unit<FeedForwardImpl>> feed_forward{nullptr};
};
using UnitGpt = GptOfUnits<PlainShardUnit>;

// Sets deterministic parameter values. Random values would differ between ranks and runs, because
// the threads of the ranks share the random generator of the process.
inline void set_values(nn::Module& module) {
  const torch::NoGradGuard no_grad;
  double phase = 0;
  for (const Tensor& parameter : module.parameters()) {
    const Tensor places = torch::arange(parameter.numel(), torch::kDouble).view(parameter.sizes());
    parameter.copy_(torch::sin(places + ++phase) / 2);
  }
}

template <template <typename> typename Unit>
std::shared_ptr<Model> make_model_of_units(const Case& test_case) {
  std::shared_ptr<Model> model;
  if (test_case.model.starts_with("mixed")) {
    return make_mixed<Mixed<Unit, PlainShardUnit>>(test_case);
  }
  if (test_case.model == "mlp") {
    model = std::make_shared<MlpOfUnits<Unit>>();
  } else if (test_case.model == "cnn") {
    model = std::make_shared<CnnOfUnits<Unit>>(test_case.dtype);
  } else {
    model = std::make_shared<GptOfUnits<Unit>>();
  }
  model->to(test_case.dtype);
  return model;
}

// Makes the same models as make_model(), divided into units. Some parameters of the GPT have other
// names.
inline std::shared_ptr<Model> make_unit_model(const Case& test_case, uint64_t seed) {
  const std::shared_ptr<Model> model = test_case.is_checkpointed
                                           ? make_model_of_units<CheckpointedUnit>(test_case)
                                           : make_model_of_units<PlainShardUnit>(test_case);
  const auto source = parameters_of(*make_model(test_case, seed));
  const torch::NoGradGuard no_grad;
  const auto parameters = parameters_of(*model);
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(source[i]);
  return model;
}

}  // namespace cadre::testing
