#include "cadre/parallel/deferred/deferred_init.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "cadre/tensor/hooks/named_tensors.h"

// gcc 12 warns that the default values of libtorch's optional arguments may be uninitialized.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace cadre {
namespace {

namespace init = torch::nn::init;
using torch::nn::Module;

constexpr uint64_t kSeed = 20261123;

std::vector<NamedTensor> tensors_of(const Module& module) {
  std::vector<NamedTensor> tensors = distinct_parameters(module);
  for (NamedTensor& buffer : distinct_buffers(module)) tensors.push_back(std::move(buffer));
  return tensors;
}

bool has_equal_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.strides() != b.strides() || a.dtype() != b.dtype() ||
      a.device() != b.device() || a.requires_grad() != b.requires_grad()) {
    return false;
  }
  const at::Tensor x = a.detach().contiguous();
  const at::Tensor y = b.detach().contiguous();
  return x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

void expect_same_module(const Module& deferred, const Module& plain) {
  const std::vector<NamedTensor> got = tensors_of(deferred);
  const std::vector<NamedTensor> expected = tensors_of(plain);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].name, expected[i].name);
    EXPECT_TRUE(has_equal_bits(got[i].tensor, expected[i].tensor))
        << got[i].name << " of " << plain.name() << "\n"
        << got[i].tensor.options() << "\n"
        << expected[i].tensor.options();
  }
}

// Constructs the module plainly and deferred with the same seed, and expects equal bits in all
// tensors, and equal states of the random generator after the construction.
template <typename Make>
void expect_bits_of_plain_construction(const Make& make) {
  torch::manual_seed(kSeed);
  const auto plain = make();
  const at::Tensor after_plain = torch::rand({5});
  torch::manual_seed(kSeed);
  const auto deferred = defer_init(make);
  const at::Tensor after_deferred = torch::rand({5});
  EXPECT_TRUE(after_plain.equal(after_deferred)) << "the generator stands elsewhere";
  size_t num_deferred = 0;
  for (const NamedTensor& named : tensors_of(*deferred)) num_deferred += is_deferred(named.tensor);
  EXPECT_GT(num_deferred, 0U);
  std::vector<const void*> identities;
  for (const NamedTensor& named : tensors_of(*deferred)) {
    identities.push_back(named.tensor.unsafeGetTensorImpl());
  }
  torch::manual_seed(1);
  const at::Tensor before = torch::rand({5});
  torch::manual_seed(1);
  materialize(*deferred);
  EXPECT_TRUE(torch::rand({5}).equal(before)) << "materialize() has moved the generator";
  const std::vector<NamedTensor> tensors = tensors_of(*deferred);
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(tensors[i].tensor.unsafeGetTensorImpl(), identities[i]);
  }
  expect_same_module(*deferred, *plain);
}

template <typename Holder, typename... Args>
void expect_bits(Args... args) {
  SCOPED_TRACE(typeid(Holder).name());
  expect_bits_of_plain_construction([&] { return Holder(args...).ptr(); });
}

TEST(DeferInitTest, LayersOfLibtorch) {
  expect_bits<torch::nn::Linear>(37, 53);
  expect_bits<torch::nn::Conv1d>(torch::nn::Conv1dOptions(3, 8, 5));
  expect_bits<torch::nn::Conv2d>(torch::nn::Conv2dOptions(3, 8, 5).bias(false));
  expect_bits<torch::nn::ConvTranspose2d>(torch::nn::ConvTranspose2dOptions(4, 6, 3));
  expect_bits<torch::nn::Embedding>(torch::nn::EmbeddingOptions(50, 7).padding_idx(3));
  expect_bits<torch::nn::EmbeddingBag>(torch::nn::EmbeddingBagOptions(50, 7));
  expect_bits<torch::nn::LayerNorm>(torch::nn::LayerNormOptions({19}));
  expect_bits<torch::nn::GroupNorm>(torch::nn::GroupNormOptions(2, 8));
  expect_bits<torch::nn::BatchNorm2d>(torch::nn::BatchNorm2dOptions(9));
  expect_bits<torch::nn::InstanceNorm1d>(
      torch::nn::InstanceNorm1dOptions(4).affine(true).track_running_stats(true));
  expect_bits<torch::nn::PReLU>();
  expect_bits<torch::nn::Bilinear>(torch::nn::BilinearOptions(5, 6, 7));
}

TEST(DeferInitTest, RecurrentAndAttentionLayers) {
  expect_bits<torch::nn::LSTM>(torch::nn::LSTMOptions(6, 10).num_layers(2).bidirectional(true));
  expect_bits<torch::nn::GRU>(torch::nn::GRUOptions(6, 10));
  expect_bits<torch::nn::LSTMCell>(torch::nn::LSTMCellOptions(6, 10));
  expect_bits<torch::nn::MultiheadAttention>(torch::nn::MultiheadAttentionOptions(16, 4));
  expect_bits<torch::nn::TransformerEncoder>(torch::nn::TransformerEncoderOptions(
      torch::nn::TransformerEncoderLayer(torch::nn::TransformerEncoderLayerOptions(16, 2)), 2));
  expect_bits<torch::nn::Transformer>(torch::nn::TransformerOptions(16, 2, 1, 1));
}

// A module with one parameter, which `fill` initializes.
struct Filled : Module {
  explicit Filled(std::vector<int64_t> sizes, const std::function<void(torch::Tensor)>& fill) {
    weight = register_parameter("weight", torch::empty(sizes));
    const torch::NoGradGuard no_grad;
    fill(weight);
  }
  torch::Tensor weight;
};

void expect_bits_of(const std::vector<int64_t>& sizes,
                    const std::function<void(torch::Tensor)>& fill) {
  expect_bits_of_plain_construction([&] { return std::make_shared<Filled>(sizes, fill); });
}

TEST(DeferInitTest, Initializers) {
  expect_bits_of({7, 5}, [](auto w) { init::orthogonal_(w, 1.5); });
  expect_bits_of({5, 7}, [](auto w) { init::orthogonal_(w); });
  expect_bits_of({5, 5}, [](auto w) { init::eye_(w); });
  expect_bits_of({4, 4, 3, 3}, [](auto w) { init::dirac_(w); });
  expect_bits_of({9, 6}, [](auto w) { init::sparse_(w, 0.3); });
  expect_bits_of({9, 6}, [](auto w) { init::kaiming_normal_(w); });
  expect_bits_of({9, 6}, [](auto w) { init::xavier_normal_(w); });
  // Truncated normal distribution, by inverting the distribution function.
  expect_bits_of({9, 6}, [](auto w) {
    w.uniform_(-0.95, 0.95);
    w.erfinv_();
    w.mul_(0.02 * std::sqrt(2.0)).add_(0.5).clamp_(0.4, 0.6);
  });
  expect_bits_of({40, 6}, [](auto w) {  // truncated normal distribution, by rejection
    const torch::Tensor draws = torch::randn({40, 6, 4});
    const torch::Tensor is_valid = (draws < 2) & (draws > -2);
    const torch::Tensor index = std::get<1>(is_valid.to(torch::kByte).max(-1, true));
    w.copy_(draws.gather(-1, index).squeeze(-1)).mul_(0.02);
  });
}

TEST(DeferInitTest, RandomOperationsOfEveryKind) {
  expect_bits_of({10}, [](auto w) { w.copy_(torch::randperm(10)); });
  expect_bits_of({10}, [](auto w) { w.copy_(torch::randint(3, 90, {10})); });
  expect_bits_of({10}, [](auto w) { w.copy_(torch::randn_like(w)).add_(torch::rand({10})); });
  expect_bits_of({10}, [](auto w) { w.fill_(0.5).copy_(torch::bernoulli(w)); });
  expect_bits_of({10}, [](auto w) { w.fill_(3).copy_(torch::poisson(w)); });
  expect_bits_of({4}, [](auto w) {  // the probabilities determine how many random numbers are drawn
    const torch::Tensor chances = torch::rand({10});
    w.copy_(torch::multinomial(chances, 4)).add_(torch::randn({4}));
  });
  expect_bits_of({40}, [](auto w) { w.copy_(torch::dropout(torch::ones({40}), 0.5, true)); });
  expect_bits_of({10}, [](auto w) { w.exponential_().log_().mul_(torch::normal(0.0, 1.0, {10})); });
  expect_bits_of({33}, [](auto w) {
    auto generator = at::detail::createCPUGenerator(99);
    w.normal_(0, 1, generator);
    w.narrow(0, 5, 20).uniform_(0, 1, generator);
  });
}

// A module whose tensors depend on each other in many ways: views, copies before and after changes,
// constants, direct writes to memory, and values that a condition reads.
struct Woven : Module {
  Woven() {
    const torch::NoGradGuard no_grad;
    const torch::Tensor both = torch::randn({6, 4});
    first = register_parameter("first", both.narrow(0, 0, 3));
    second = register_parameter("second", both.narrow(0, 3, 3));
    second.add_(first);  // `first` and `second` are halves of one storage
    copied = register_parameter("copied", first.clone());
    first.mul_(-2);  // must not change `copied`
    torch::Tensor table = torch::zeros({8, 6});
    const torch::Tensor position = torch::arange(0, 8).unsqueeze(1);
    const torch::Tensor rate =
        torch::exp(torch::arange(0, 6, 2) * torch::tensor(-std::log(10000.0) / 6));
    table.index_put_(
        {torch::indexing::Slice(), torch::indexing::Slice(0, torch::indexing::None, 2)},
        torch::sin(position * rate));
    table.index_put_(
        {torch::indexing::Slice(), torch::indexing::Slice(1, torch::indexing::None, 2)},
        torch::cos(position * rate));
    register_buffer("table", table);
    register_buffer("constants", torch::tensor({1.0F, 2.5F, -3.0F}));
    register_buffer("nested", torch::tensor({{1, 2}, {3, 4}}, torch::kInt));
    register_buffer("mask", torch::ones({4, 4}, torch::kBool).tril());
    torch::Tensor written = torch::empty({3, 2}, torch::kDouble);
    auto elements = written.accessor<double, 2>();
    for (int64_t i = 0; i < 6; ++i) elements[i / 2][i % 2] = static_cast<double>(i) / 3;
    register_buffer("written", written);
    transposed = register_parameter("transposed", torch::rand({3, 5}).t());
    // Shares memory with the parameter `copied`.
    register_buffer("view", copied.view(-1).slice(0, 2, 9));
    std::vector<float> given{4, 5, 6, 7};
    register_buffer("given",
                    torch::from_blob(given.data(), {4}, torch::kFloat) + torch::zeros({4}));
    register_buffer("absent", torch::Tensor());
    register_buffer("empty", torch::empty({0, 3}));
    register_buffer("chosen", std::get<0>(torch::randn({9}).topk(3)));
    if (copied.norm().item<float>() > 0) register_buffer("conditional", torch::full({2}, 7));
    register_buffer("from_outside", outside() * torch::ones({2}));
  }
  static torch::Tensor outside() {
    const std::vector<double> values{0.1, 0.2};
    return torch::tensor(values);
  }
  torch::Tensor first;
  torch::Tensor second;
  torch::Tensor copied;
  torch::Tensor transposed;
};

TEST(DeferInitTest, ViewsConstantsAndDependentValues) {
  expect_bits_of_plain_construction([] { return std::make_shared<Woven>(); });
}

TEST(DeferInitTest, TensorsThatSharedMemoryShareItAgain) {
  const auto module = defer_init([] { return std::make_shared<Woven>(); });
  materialize(*module);
  EXPECT_EQ(module->first.storage().unsafeGetStorageImpl(),
            module->second.storage().unsafeGetStorageImpl());
  const torch::NoGradGuard no_grad;
  module->copied.fill_(8);
  EXPECT_EQ(module->named_buffers()["view"].sum().item<float>(), 8 * 7);
}

struct Head : Module {
  explicit Head(const torch::Tensor& tied) : weight(register_parameter("weight", tied)) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::matmul(x, weight.t()); }
  torch::Tensor weight;
};

struct Tied : Module {
  Tied() {
    embedding = register_module("embedding", torch::nn::Embedding(20, 6));
    block = register_module(
        "block", torch::nn::Sequential(torch::nn::Linear(6, 6), torch::nn::BatchNorm1d(6)));
    head = register_module("head", std::make_shared<Head>(embedding->weight));
    apply([this](Module& module) { initialize(module); });
  }
  void initialize(Module& module) {
    const torch::NoGradGuard no_grad;
    if (auto* linear = module.as<torch::nn::Linear>()) {
      linear->weight.normal_(0, 0.02);
      linear->bias.zero_();
    }
    if (auto* embedded = module.as<torch::nn::Embedding>()) embedded->weight.normal_(0, 0.02);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Sequential block{nullptr};
  std::shared_ptr<Head> head;
};

TEST(DeferInitTest, TiedParametersAndAPassOverAllModules) {
  expect_bits_of_plain_construction([] {
    auto model = std::make_shared<Tied>();
    EXPECT_TRUE(model->head->weight.is_same(model->embedding->weight));
    return model;
  });
}

TEST(DeferInitTest, ChangesOfTheDtype) {
  expect_bits_of_plain_construction([] {
    auto model = std::make_shared<Tied>();
    model->to(torch::kBFloat16);
    return model;
  });
}

TEST(DeferInitTest, RecordsAfterTheScope) {
  const auto make = [] { return std::make_shared<Tied>(); };
  const auto change = [](Tied& model) {
    model.to(torch::kDouble);
    model.apply([&](Module& module) { model.initialize(module); });
    const torch::NoGradGuard no_grad;
    model.head->weight.mul_(torch::linspace(1, 2, 6, torch::kDouble));
  };
  torch::manual_seed(kSeed);
  const auto plain = make();
  change(*plain);
  torch::manual_seed(kSeed);
  const auto deferred = defer_init(make);
  change(*deferred);
  defer_init([&] {  // records in a second scope
    const torch::NoGradGuard no_grad;
    deferred->head->weight.add_(torch::ones({6}, torch::kDouble));
    return 0;
  });
  const torch::NoGradGuard no_grad;
  plain->head->weight.add_(torch::ones({6}, torch::kDouble));
  materialize(*deferred);
  expect_same_module(*deferred, *plain);
}

TEST(DeferInitTest, OneSubmoduleAfterTheOther) {
  torch::manual_seed(kSeed);
  const Tied plain;
  torch::manual_seed(kSeed);
  const auto deferred = defer_init([] { return std::make_shared<Tied>(); });
  materialize(deferred->block);
  EXPECT_FALSE(is_deferred(deferred->block->parameters()[0]));
  EXPECT_TRUE(is_deferred(deferred->embedding->weight));
  materialize(*deferred);
  expect_same_module(*deferred, plain);
  materialize(*deferred);  // does nothing, because no deferred tensor is left
}

TEST(DeferInitTest, AMaterializedModuleTrains) {
  torch::manual_seed(kSeed);
  const auto plain = std::make_shared<Tied>();
  torch::manual_seed(kSeed);
  const auto deferred = defer_init([] { return std::make_shared<Tied>(); });
  materialize(*deferred);
  for (const auto& model : {plain, deferred}) {
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const torch::Tensor hidden =
          model->block->forward(model->embedding->forward(torch::arange(8)));
      model->head->forward(hidden).square().mean().backward();
      optimizer.step();
    }
  }
  expect_same_module(*deferred, *plain);
}

// The constructor runs a forward to determine a size. The forward changes the running statistics of
// the BatchNorm, which must be recorded.
struct Probing : Module {
  Probing() {
    features = register_module(
        "features", torch::nn::Sequential(torch::nn::Conv2d(1, 3, 3), torch::nn::BatchNorm2d(3),
                                          torch::nn::ReLU(), torch::nn::MaxPool2d(2)));
    const auto numel = features->forward(torch::ones({2, 1, 12, 12})).flatten(1).size(1);
    head = register_module("head", torch::nn::Linear(numel, 4));
  }
  torch::nn::Sequential features{nullptr};
  torch::nn::Linear head{nullptr};
};

TEST(DeferInitTest, AForwardInTheConstructor) {
  expect_bits_of_plain_construction([] { return std::make_shared<Probing>(); });
}

TEST(DeferInitTest, TheDefaultDtypeOfConstructionCounts) {
  struct DoubleByDefault {
    DoubleByDefault() { torch::set_default_dtype(caffe2::TypeMeta::Make<double>()); }
    ~DoubleByDefault() { torch::set_default_dtype(caffe2::TypeMeta::Make<float>()); }
  };
  expect_bits_of_plain_construction([] {
    const DoubleByDefault is_double;
    return std::make_shared<Filled>(std::vector<int64_t>{3},
                                    [](auto w) { w.copy_(torch::rand({3})); });
  });
}

TEST(DeferInitTest, WritesToATensorFromOutsideGiveItTheValues) {
  torch::manual_seed(kSeed);
  const torch::Tensor expected = torch::nn::Linear(3, 2)->weight.detach();
  torch::Tensor outside = torch::zeros({2, 3});
  torch::manual_seed(kSeed);
  defer_init([&] {
    torch::nn::Linear linear(3, 2);
    const torch::NoGradGuard no_grad;
    outside.copy_(linear->weight);
    return linear;
  });
  EXPECT_TRUE(outside.equal(expected));
}

TEST(DeferInitTest, LaterChangesOfATensorFromOutsideDoNotMatter) {
  torch::Tensor outside = torch::full({3}, 5.0);
  const auto module = defer_init([&] {
    return std::make_shared<Filled>(std::vector<int64_t>{3}, [&](auto w) { w.copy_(outside); });
  });
  outside.zero_();
  materialize(*module);
  EXPECT_TRUE(module->weight.equal(torch::full({3}, 5.0)));
}

// Cloneable::clone() sets parameters by assigning tensors, which is no operation; the recorder
// records aten::clone for this case.
TEST(DeferInitTest, ClonesOfAModuleFromOutside) {
  const torch::nn::Linear outside(3, 4);
  const auto module = defer_init([&] { return outside->clone(); });
  EXPECT_TRUE(is_deferred(module->parameters()[0]));
  materialize(*module);
  expect_same_module(*module, *outside);
}

}  // namespace
}  // namespace cadre
