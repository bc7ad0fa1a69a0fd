// What the equality tests train: a small MLP, CNN or GPT, for 20 steps of SGD or AdamW, alone or on
// ranks, in a group that may do one thing wrong.
//
// Threads: train_on_ranks makes one for each rank. Blocking: until all ranks have ended. Errors: a
// rank that fails fails the test.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "cadre/parallel/ddp/ddp_test_ranks.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"

namespace cadre::testing {

using torch::Tensor;
namespace nn = torch::nn;

inline constexpr int kSteps = 20;
inline constexpr int64_t kVocabulary = 11;
inline constexpr int64_t kContext = 6;
inline constexpr double kLearningRateOfSgd = 0.05;
inline constexpr double kLearningRateOfAdamw = 0.003;
inline constexpr double kBeta1 = 0.9;
inline constexpr double kBeta2 = 0.999;
inline constexpr double kEpsilon = 1e-8;

// What a test trains: loss() is the mean over the rows of its batch.
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

// The network of PyTorch's MNIST example in small, without its dropout. A kink (ReLU, the choice of
// max pooling) turns a difference in the last bit of its input into a visible one of the gradient,
// which no bound covers. In float64 none of some 10^5 activations comes so close to a kink; in
// float32 some do, so there the same layers stand between smooth functions.
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
  // The class of an image is the brightest of its first pixels.
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

// One pre-norm block with causal attention and a head tied to the token embedding.
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

enum class Fault { kNone, kNoDivision, kDroppedBucket, kNoInitialBroadcast };

inline std::ostream& operator<<(std::ostream& out, Fault fault) {
  switch (fault) {
    case Fault::kNone:
      return out << "None";
    case Fault::kNoDivision:
      return out << "NoDivision";
    case Fault::kDroppedBucket:
      return out << "DroppedBucket";
    case Fault::kNoInitialBroadcast:
      return out << "NoInitialBroadcast";
  }
  return out;
}

// A group that does one thing wrong, the same on all ranks.
class FaultyReplicas : public ReplicaGroup {
 public:
  FaultyReplicas(const ProcessGroup& group, Fault fault)
      : real_(make_replica_group(group)), fault_(fault) {}

  Rank rank() const override { return real_->rank(); }
  int world_size() const override { return real_->world_size(); }
  at::Tensor empty_flat(int64_t numel, at::ScalarType dtype) override {
    return real_->empty_flat(numel, dtype);
  }
  std::function<void()> all_reduce_async(const at::Tensor& tensor, ReduceOp op) override {
    if (drops(tensor)) return [] {};
    return real_->all_reduce_async(tensor, divided(op));
  }
  void all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    if (!drops(tensor)) real_->all_reduce(tensor, divided(op));
  }
  void broadcast(const at::Tensor& tensor, Rank root) override {
    if (fault_ == Fault::kNoInitialBroadcast && tensor.scalar_type() == at::kByte) {
      // What was never received must not be, by chance, what freed memory of the root still holds.
      if (rank() != root) tensor.zero_();
      return;
    }
    real_->broadcast(tensor, root);
  }
  void all_gather(const at::Tensor& output, const at::Tensor& input) override {
    real_->all_gather(output, input);
  }

 private:
  bool drops(const at::Tensor& tensor) {
    return fault_ == Fault::kDroppedBucket && tensor.is_floating_point() && num_buckets_++ % 3 == 1;
  }
  ReduceOp divided(ReduceOp op) const {
    return fault_ == Fault::kNoDivision && op == ReduceOp::kAvg ? ReduceOp::kSum : op;
  }

  std::shared_ptr<ReplicaGroup> real_;
  Fault fault_;
  int num_buckets_ = 0;
};

struct Case {
  std::string model;
  std::string optimizer;
  int64_t batch;
  torch::ScalarType dtype = torch::kDouble;
};

inline std::ostream& operator<<(std::ostream& out, const Case& test_case) {
  return out << test_case.model << "_" << test_case.optimizer << "_" << test_case.batch << "_"
             << (test_case.dtype == torch::kDouble ? "float64" : "float32");
}

inline std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    for (const char* model : {"mlp", "cnn", "gpt"}) {
      for (const char* optimizer : {"sgd", "adamw"}) {
        for (const int64_t batch : {48, 25}) cases.push_back({model, optimizer, batch, dtype});
      }
    }
  }
  return cases;
}

using Snapshot = std::vector<Tensor>;

struct Training {
  std::vector<Snapshot> gradients;  // of each step, before the update
  Snapshot parameters;
};

inline std::shared_ptr<Model> make_model(const Case& test_case, uint64_t seed) {
  torch::manual_seed(seed);
  std::shared_ptr<Model> model;
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

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Case& test_case,
                                                               Model& model) {
  if (test_case.optimizer == "sgd") {
    return std::make_unique<torch::optim::SGD>(
        model.parameters(), torch::optim::SGDOptions(kLearningRateOfSgd).momentum(0.9));
  }
  return std::make_unique<torch::optim::AdamW>(
      model.parameters(),
      torch::optim::AdamWOptions(kLearningRateOfAdamw).betas({kBeta1, kBeta2}).eps(kEpsilon));
}

inline Snapshot copies_of(const std::vector<Tensor>& tensors) {
  Snapshot copies;
  for (const Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

inline Snapshot gradients_of(const Model& model) {
  Snapshot gradients;
  for (const Tensor& parameter : model.parameters()) gradients.push_back(parameter.grad());
  return copies_of(gradients);
}

// `forward(batch)` runs the model on this rank's rows of a batch and returns their loss.
inline Training train(const Case& test_case, Model& model, const std::vector<Tensor>& batches,
                      const std::function<Tensor(const Tensor&)>& loss_of_batch) {
  Training training;
  const auto optimizer = make_optimizer(test_case, model);
  for (const Tensor& batch : batches) {
    optimizer->zero_grad();
    loss_of_batch(batch).backward();
    training.gradients.push_back(gradients_of(model));
    optimizer->step();
  }
  training.parameters = copies_of(model.parameters());
  return training;
}

inline std::string bits_of(const Snapshot& tensors) {
  std::string bits;
  for (const Tensor& tensor : tensors) {
    bits.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return bits;
}

inline std::vector<Tensor> make_batches(const Case& test_case, uint64_t seed) {
  const auto source = make_model(test_case, seed);
  torch::manual_seed(seed + 98);
  std::vector<Tensor> batches;
  for (int step = 0; step < kSteps; ++step) batches.push_back(source->make_batch(test_case.batch));
  return batches;
}

inline Training train_alone(const Case& test_case, const std::vector<Tensor>& batches,
                            uint64_t seed) {
  const auto model = make_model(test_case, seed);
  return train(test_case, *model, batches,
               [&](const Tensor& batch) { return model->loss(model->forward(batch), batch); });
}

// On one rank; all ranks call it. Each brings a module with weights of its own, so only the
// broadcast makes them equal.
inline Training train_on_rank(const Case& test_case, const std::vector<Tensor>& batches,
                              const ProcessGroup& group, const std::shared_ptr<Model>& module,
                              Fault fault = Fault::kNone) {
  const bool is_even = test_case.batch % group.world_size() == 0;
  const auto element_bytes = static_cast<int64_t>(torch::elementSize(test_case.dtype));
  DistributedDataParallel model{
      module,
      std::make_shared<FaultyReplicas>(group, fault),
      {.weighting = is_even ? GradientWeighting::kEqual : GradientWeighting::kSamples,
       .bucket_caps = {.first_bytes = 64 * element_bytes, .bytes = 256 * element_bytes}}};
  const Share share = share_of(test_case.batch, group.rank(), group.world_size());
  return train(test_case, *module, batches, [&](const Tensor& batch) {
    const Tensor rows = batch.narrow(0, share.begin, share.size());
    if (!is_even) model.set_num_samples(share.size());
    return module->loss(model(rows), rows);
  });
}

// By rank, on ranks as threads.
inline std::vector<Training> train_on_ranks(const Case& test_case,
                                            const std::vector<Tensor>& batches, uint64_t seed,
                                            int world_size, Fault fault = Fault::kNone) {
  std::vector<std::shared_ptr<Model>> models;
  for (int rank = 0; rank < world_size; ++rank) {
    models.push_back(make_model(test_case, seed + static_cast<uint64_t>(rank)));
  }
  std::vector<Training> trained(static_cast<size_t>(world_size));
  const auto result = run_groups(world_size, [&](const ProcessGroup& group, std::string&) {
    trained[group.rank()] = train_on_rank(test_case, batches, group, models[group.rank()], fault);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return trained;
}

}  // namespace cadre::testing
