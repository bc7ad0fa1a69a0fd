// The models of the equality tests of wrappers: a small MLP, CNN or GPT, or a model of parameters
// that are shared, frozen, unused and of uneven sizes, in float64 or float32, or partly in
// bfloat16.
//
// Threads: one for each model. Blocking: never.
#pragma once

#include <torch/nn.h>
#include <torch/types.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace cadre::testing {

using torch::Tensor;
namespace nn = torch::nn;

inline constexpr int64_t kVocabulary = 11;
inline constexpr int64_t kContext = 6;

// The base class of models that a test trains. loss() is the mean over the rows of the batch.
struct Model : nn::Module {
  virtual Tensor forward(const Tensor& x) = 0;
  virtual Tensor loss(const Tensor& output, const Tensor& x) = 0;
  virtual Tensor make_batch(int64_t rows) = 0;
};

struct Mlp : Model {
  Mlp() {
    layers =
        register_module("layers", nn::Sequential(nn::Linear(12, 24), nn::Tanh(), nn::Linear(24, 16),
                                                 nn::Tanh(), nn::Linear(16, 3)));
  }
  Tensor forward(const Tensor& x) override { return layers->forward(x); }
  Tensor loss(const Tensor& output, const Tensor& x) override {
    return (output - x.narrow(1, 0, 3)).pow(2).mean();
  }
  Tensor make_batch(int64_t rows) override {
    return torch::randn({rows, 12}, layers->parameters()[0].dtype());
  }
  nn::Sequential layers;
};

// A small version of the network of PyTorch's MNIST example, without dropout. ReLU and max pooling
// have kinks: near one, a difference in the last bit of an activation changes the gradient by much
// more than any bound. In float64 none of the 10^5 activations is that close to a kink. In float32
// some are, so in float32 the model uses smooth functions instead.
struct TinyCnn : Model {
  explicit TinyCnn(torch::ScalarType dtype) : is_smooth(dtype == torch::kFloat) {
    conv1 = register_module("conv1", nn::Conv2d(nn::Conv2dOptions(1, 4, 3)));
    conv2 = register_module("conv2", nn::Conv2d(nn::Conv2dOptions(4, 6, 3)));
    fc1 = register_module("fc1", nn::Linear(6 * 2 * 2, 12));
    fc2 = register_module("fc2", nn::Linear(12, kClasses));
  }
  Tensor activate(const Tensor& x) const { return is_smooth ? torch::gelu(x) : torch::relu(x); }
  Tensor forward(const Tensor& x) override {
    Tensor h = activate(conv2(activate(conv1(x))));
    h = is_smooth ? torch::avg_pool2d(h, 2) : torch::max_pool2d(h, 2);
    return torch::log_softmax(fc2(activate(fc1(h.flatten(1)))), 1);
  }
  // The class of an image is the index of the brightest of its first pixels.
  Tensor loss(const Tensor& output, const Tensor& x) override {
    return torch::nll_loss(output, x.flatten(1).narrow(1, 0, kClasses).argmax(1));
  }
  Tensor make_batch(int64_t rows) override {
    return torch::randn({rows, 1, 8, 8}, conv1->weight.dtype());
  }
  static constexpr int64_t kClasses = 5;
  const bool is_smooth;
  nn::Conv2d conv1{nullptr}, conv2{nullptr};
  nn::Linear fc1{nullptr}, fc2{nullptr};
};

// A model with one pre-norm block with causal attention, and a head that is tied to the token
// embedding.
struct TinyGpt : Model {
  TinyGpt() {
    constexpr int64_t kWidth = 8;
    tokens = register_module("tokens", nn::Embedding(kVocabulary, kWidth));
    positions = register_module("positions", nn::Embedding(kContext, kWidth));
    norm_1 = register_module("norm_1", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
    project = register_module("project", nn::Linear(kWidth, kWidth));
    norm_2 = register_module("norm_2", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    up = register_module("up", nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", nn::Linear(4 * kWidth, kWidth));
  }
  Tensor forward(const Tensor& x) override {
    Tensor h = tokens(x) + positions(torch::arange(x.size(1)));
    const auto parts = qkv(norm_1(h)).chunk(3, -1);
    h = h + project(torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0,
                                                        /*is_causal=*/true));
    h = h + down(torch::gelu(up(norm_2(h))));
    return torch::matmul(h, tokens->weight.t());
  }
  Tensor loss(const Tensor& output, const Tensor& x) override {
    return nn::functional::cross_entropy(output.reshape({-1, kVocabulary}),
                                         x.roll(-1, 1).reshape({-1}));
  }
  Tensor make_batch(int64_t rows) override {
    return torch::randint(kVocabulary, {rows, kContext}, torch::kLong);
  }
  nn::Embedding tokens{nullptr}, positions{nullptr};
  nn::LayerNorm norm_1{nullptr}, norm_2{nullptr};
  nn::Linear qkv{nullptr}, project{nullptr}, up{nullptr}, down{nullptr};
};

// A linear layer with a scalar (0-dim) factor `gain`. Its weight may be shared with another module.
struct GainedLinearImpl : nn::Module {
  GainedLinearImpl(Tensor shared_weight, double first_gain)
      : weight(register_parameter("weight", std::move(shared_weight))),
        bias(register_parameter("bias", torch::zeros({weight.size(0)}))),
        gain(register_parameter("gain", torch::tensor(first_gain))) {}
  // The dtype of the gain may differ from that of x.
  Tensor forward(const Tensor& x) {
    return torch::tanh(torch::linear(x, weight, bias) * gain.to(x.scalar_type()));
  }
  Tensor weight, bias, gain;
};

// A layer that uses its parameters only for some rows, so a rank with few rows may not use them at
// all. `mark`, of shape (rows), selects the rows.
struct RareLinearImpl : nn::Module {
  RareLinearImpl(int64_t in, int64_t out) {
    linear = register_module("linear", nn::Linear(in, out));
  }
  Tensor forward(const Tensor& x, const Tensor& mark) {
    const Tensor rows = (mark > 1.6).nonzero().squeeze(1);
    if (rows.numel() == 0) return x;
    return x.index_add(0, rows, linear(x.index_select(0, rows)));
  }
  nn::Linear linear{nullptr};
};

// The default for Unit<M>: the module M itself. A model uses Unit<M> for each M that a wrapper may
// treat as a unit.
template <typename M>
using PlainUnit = M;

// A model with parameters of every kind: frozen ones before and between trained parameters, a
// weight that two units share, a unit that is called twice, parameters outside of units that are
// used only for some rows (so perhaps on no rank), a unit that is never used, and sizes that are
// not divisible by any number of ranks. With has_bfloat16, one whole unit and one parameter of
// another unit have the dtype bfloat16. Unit is the template for modules that share no parameters,
// and TiedUnit for the others and for the first module, whose backward comes last.
template <template <typename> typename Unit, template <typename> typename TiedUnit = Unit>
struct Mixed : Model {
  explicit Mixed(bool has_bfloat16) : has_bfloat16_(has_bfloat16) {
    const Tensor tied = torch::randn({kWidth, kWidth}) / 4;
    stem = register_module("stem", TiedLinear(7, kWidth));
    entry = register_module("entry", nn::Linear(kWidth, kWidth));
    first = register_module("first", TiedGain(tied, 1.5));
    fixed = register_module("fixed", LinearUnit(kWidth, kWidth));
    second = register_module("second", TiedGain(first->weight, 0.5));
    twice = register_module("twice", TiedLinear(kWidth, kWidth));
    rare = register_module("rare", nn::ModuleHolder<RareLinearImpl>(kWidth, kWidth));
    never = register_module("never", LinearUnit(kWidth, 3));
    narrow = register_module("narrow", Gain(torch::randn({kWidth, kWidth}) / 4, 1.0));
    head = register_module("head", nn::Linear(kWidth, 3));
    for (nn::Module* module : std::initializer_list<nn::Module*>{stem.get(), fixed.get()}) {
      for (Tensor& parameter : module->parameters()) parameter.set_requires_grad(false);
    }
    second->bias.set_requires_grad(false);
  }
  // Converts the parameters that the class comment names to bfloat16. Must be called after to().
  void narrow_parameters() {
    if (!has_bfloat16_) return;
    narrow->to(torch::kBFloat16);
    second->gain.set_data(second->gain.detach().to(torch::kBFloat16));
  }
  Tensor forward(const Tensor& x) override {
    Tensor h = entry(torch::tanh(stem(x)));
    h = h + first(h);
    h = h + second(fixed(h));
    h = h + torch::tanh(twice(torch::tanh(twice(h))));
    h = rare(h, x.select(1, 0));
    h = h + narrow(h.to(narrow->weight.scalar_type())).to(h.scalar_type());
    return head(h);
  }
  Tensor loss(const Tensor& output, const Tensor& x) override {
    return (output - x.narrow(1, 0, 3)).pow(2).mean();
  }
  Tensor make_batch(int64_t rows) override { return torch::randn({rows, 7}, head->weight.dtype()); }

  using LinearUnit = nn::ModuleHolder<Unit<nn::LinearImpl>>;
  using TiedLinear = nn::ModuleHolder<TiedUnit<nn::LinearImpl>>;
  using Gain = nn::ModuleHolder<Unit<GainedLinearImpl>>;
  using TiedGain = nn::ModuleHolder<TiedUnit<GainedLinearImpl>>;
  static constexpr int64_t kWidth = 13;
  LinearUnit fixed{nullptr}, never{nullptr};
  TiedLinear stem{nullptr}, twice{nullptr};
  TiedGain first{nullptr}, second{nullptr};
  Gain narrow{nullptr};
  nn::ModuleHolder<RareLinearImpl> rare{nullptr};
  nn::Linear entry{nullptr}, head{nullptr};

 private:
  bool has_bfloat16_;
};

struct Case {
  std::string model;  // mlp, cnn, gpt, mixed, mixed_bfloat16
  std::string optimizer;
  int64_t batch;
  torch::ScalarType dtype = torch::kDouble;
  // Whether the units of the model use activation checkpointing.
  bool is_checkpointed = false;
};

inline bool has_bfloat16(const Case& test_case) {
  return test_case.model == "mixed_bfloat16";
}

inline std::ostream& operator<<(std::ostream& out, const Case& test_case) {
  return out << test_case.model << "_" << test_case.optimizer << "_" << test_case.batch << "_"
             << (test_case.dtype == torch::kDouble ? "float64" : "float32")
             << (test_case.is_checkpointed ? "_checkpointed" : "");
}

template <typename MixedModel>
std::shared_ptr<Model> make_mixed(const Case& test_case) {
  const auto model = std::make_shared<MixedModel>(has_bfloat16(test_case));
  model->to(test_case.dtype);
  model->narrow_parameters();
  return model;
}

inline std::shared_ptr<Model> make_model(const Case& test_case, uint64_t seed) {
  torch::manual_seed(seed);
  std::shared_ptr<Model> model;
  if (test_case.model.starts_with("mixed")) return make_mixed<Mixed<PlainUnit>>(test_case);
  if (test_case.model == "mlp") {
    model = std::make_shared<Mlp>();
  } else if (test_case.model == "cnn") {
    model = std::make_shared<TinyCnn>(test_case.dtype);
  } else {
    model = std::make_shared<TinyGpt>();
  }
  model->to(test_case.dtype);
  return model;
}

}  // namespace cadre::testing
