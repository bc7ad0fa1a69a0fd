#include "cadre/train/trainer/models/image_classifier.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>

namespace cadre::train {
namespace {

ModelConfig small_classifier(const std::string& kind) {
  ModelConfig config;
  config.kind = kind;
  config.layers = 2;
  config.width = 24;
  return config;
}

at::Tensor some_images(int64_t count) {
  torch::manual_seed(3);
  return torch::randn({count, 1, 28, 28});
}

class EveryClassifier : public ::testing::TestWithParam<std::string> {};

TEST_P(EveryClassifier, GivesLogProbabilitiesAndLearnsOneBatch) {
  const auto model = make_image_classifier(small_classifier(GetParam()), 1);
  const at::Tensor images = some_images(8);
  const at::Tensor targets = torch::tensor({0, 1, 2, 3, 4, 5, 9, 9});
  torch::optim::Adam optimizer(model->parameters(), 0.003);
  double loss = 0;
  for (int step = 0; step < 40; ++step) {
    optimizer.zero_grad();
    const at::Tensor output = model->forward(images);
    ASSERT_EQ(output.sizes(), (at::IntArrayRef{8, kNumClasses}));
    ASSERT_TRUE(output.exp().sum(1).allclose(torch::ones({8}), 1e-5, 1e-5));
    const at::Tensor value = classification_loss(output, targets);
    if (step == 0) {
      EXPECT_NEAR(value.item<double>(), std::log(kNumClasses), 0.5);
    }
    value.backward();
    optimizer.step();
    loss = value.item<double>();
  }
  EXPECT_LT(loss, 0.5);
}

TEST_P(EveryClassifier, DependsOnTheSeedAlone) {
  const auto a = make_image_classifier(small_classifier(GetParam()), 7);
  torch::rand({3});
  const auto b = make_image_classifier(small_classifier(GetParam()), 7);
  const auto c = make_image_classifier(small_classifier(GetParam()), 8);
  for (size_t i = 0; i < a->parameters().size(); ++i) {
    EXPECT_TRUE(a->parameters()[i].equal(b->parameters()[i]));
  }
  EXPECT_FALSE(a->parameters()[0].equal(c->parameters()[0]));
}

// If a rank has no sample of a batch, its backward still runs and must produce gradients of zeros.
TEST_P(EveryClassifier, OfNothingHasAGradientOfZeros) {
  const auto model = make_image_classifier(small_classifier(GetParam()), 1);
  const at::Tensor loss =
      classification_loss(model->forward(torch::zeros({0, 1, 28, 28})), torch::zeros({0}));
  loss.backward();
  EXPECT_EQ(loss.item<double>(), 0);
  for (const at::Tensor& parameter : model->parameters()) {
    ASSERT_TRUE(parameter.grad().defined());
    EXPECT_EQ(parameter.grad().abs().max().item<double>(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryClassifier, ::testing::Values("cnn", "mlp"),
                         [](const auto& param) { return param.param; });

TEST(MnistCnn, IsTheFormula) {
  const auto model = make_image_classifier(small_classifier("cnn"), 5);
  model->eval();
  const torch::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> p;
  for (const auto& item : model->named_parameters()) p[item.key()] = item.value();
  const at::Tensor images = some_images(2);
  // Computes a convolution independently: as the product of the weight with all patches.
  const auto convolve = [&](const at::Tensor& x, const std::string& name) {
    const at::Tensor filters = p.at(name + ".weight");
    const at::Tensor patches = torch::im2col(x, {3, 3}, {1, 1}, {0, 0}, {1, 1});
    const at::Tensor sums = filters.flatten(1).matmul(patches) + p.at(name + ".bias").view({-1, 1});
    return sums.clamp_min(0).view({x.size(0), filters.size(0), x.size(2) - 2, x.size(3) - 2});
  };
  at::Tensor x = convolve(convolve(images, "conv1"), "conv2");
  x = x.view({2, 64, 12, 2, 12, 2}).amax({3, 5}).flatten(1);
  x = (x.matmul(p.at("fc1.weight").t()) + p.at("fc1.bias")).clamp_min(0);
  x = x.matmul(p.at("fc2.weight").t()) + p.at("fc2.bias");
  x = x - x.exp().sum(1, true).log();
  EXPECT_TRUE(model->forward(images).allclose(x, 1e-4, 1e-5));
  EXPECT_EQ(num_parameters(*model), 320 + 18496 + 1179776 + 1290);
}

TEST(MnistCnn, DropsOutInTrainingOnlyAndWhenTold) {
  ModelConfig config = small_classifier("cnn");
  const at::Tensor images = some_images(4);
  const auto differs = [&](Model& model) {
    return !model.forward(images).equal(model.forward(images));
  };
  const auto model = make_image_classifier(config, 1);
  EXPECT_TRUE(differs(*model));
  model->eval();
  EXPECT_FALSE(differs(*model));
  config.dropout = false;
  EXPECT_FALSE(differs(*make_image_classifier(config, 1)));
}

// The initial values must lie within the same bounds as those of the modules of torch.nn.
TEST(MnistCnn, BeginsAsPyTorchsModules) {
  const auto model = make_image_classifier(small_classifier("cnn"), 1);
  const std::map<std::string, double> num_inputs = {
      {"conv1", 9}, {"conv2", 32 * 9}, {"fc1", 9216}, {"fc2", 128}};
  for (const auto& item : model->named_parameters()) {
    const double bound = 1 / std::sqrt(num_inputs.at(item.key().substr(0, item.key().find('.'))));
    const double largest = item.value().abs().max().item<double>();
    EXPECT_LE(largest, bound) << item.key();
    EXPECT_GT(largest, 0.6 * bound) << item.key();
  }
}

}  // namespace
}  // namespace cadre::train
