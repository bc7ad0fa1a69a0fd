// Models that classify images into ten classes.
//
// Threads, blocking, errors: as Model. Parameters have the names, the shapes and the initial
// distributions of the same modules in PyTorch. Source: the network of PyTorch's basic MNIST
// example.
#pragma once

#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <vector>

#include "cadre/train/trainer/config/config.h"
#include "cadre/train/trainer/models/model.h"

namespace cadre::train {

inline constexpr int64_t kNumClasses = 10;

// Two convolutions of 3x3 (1 to 32 to 64 channels), max pooling of 2x2, and two linear layers (128,
// 10). Maps (B, 1, 28, 28) to log-probabilities (B, 10).
class MnistCnn : public Model {
 public:
  explicit MnistCnn(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& images) override;

 private:
  // Maps (B, 1, 28, 28) to (B, 9216).
  at::Tensor features(const at::Tensor& images);
  bool drops() const { return has_dropout_ && is_training(); }

  bool has_dropout_;
  // Whether backward computes the features again instead of keeping their activations.
  bool is_recomputed_;
  torch::nn::Conv2d conv1_;
  torch::nn::Conv2d conv2_;
  LinearUnit fc1_;
  torch::nn::Linear fc2_;
};

// Maps the flattened pixels through `config.layers` hidden layers of `config.width` with ReLU: (B,
// 1, 28, 28) to log-probabilities (B, 10).
class ImageMlp : public Model {
 public:
  explicit ImageMlp(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& images) override;

 private:
  std::vector<HiddenUnit> hidden_;
  torch::nn::Linear head_;
};

// Makes the model of the configuration. Its initial values depend only on `seed`, not on libtorch's
// default generator, which the ranks of one process share.
std::shared_ptr<Model> make_image_classifier(const ModelConfig& config, uint64_t seed);

// Returns the mean negative log-likelihood of log-probabilities (B, C) at targets (B), in nats. For
// an empty batch returns 0, with a gradient of zeros.
at::Tensor classification_loss(const at::Tensor& log_probabilities, const at::Tensor& targets);

}  // namespace cadre::train
