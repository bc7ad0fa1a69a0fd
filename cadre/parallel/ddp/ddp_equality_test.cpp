// Training on 1 to 4 ranks equals training in one process: the same parameters after 20 steps and
// the same gradients in the first, in float64, within 1e-10 of the largest value of each tensor.
// The check itself is proved: without the division, without a bucket or without the initial
// broadcast it fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/ddp/ddp_test_ranks.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"

namespace cadre {
namespace {

using testing::run_groups;
using testing::Share;
using testing::share_of;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int kSteps = 20;
constexpr double kTolerance = 1e-10;
constexpr int64_t kVocabulary = 11;
constexpr int64_t kContext = 6;

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
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) override { return layers->forward(x); }
  Tensor loss(const Tensor& output, const Tensor& x) override {
    return (output - x.narrow(1, 0, 3)).pow(2).mean();
  }
  Tensor make_batch(int64_t rows) override { return torch::randn({rows, 12}, torch::kDouble); }
  nn::Sequential layers;
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
    to(torch::kDouble);
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

std::ostream& operator<<(std::ostream& out, Fault fault) {
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
    const bool is_gradient = tensor.is_floating_point();
    if (fault_ == Fault::kNoDivision && op == ReduceOp::kAvg) op = ReduceOp::kSum;
    if (fault_ == Fault::kDroppedBucket && is_gradient && num_buckets_++ % 3 == 1) return [] {};
    return real_->all_reduce_async(tensor, op);
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
  std::shared_ptr<ReplicaGroup> real_;
  Fault fault_;
  int num_buckets_ = 0;
};

struct Case {
  std::string model;
  std::string optimizer;
  int64_t batch;
};

std::ostream& operator<<(std::ostream& out, const Case& test_case) {
  return out << test_case.model << "_" << test_case.optimizer << "_" << test_case.batch;
}

using Snapshot = std::vector<Tensor>;

struct Training {
  Snapshot first_gradients;
  Snapshot parameters;
};

std::shared_ptr<Model> make_model(const Case& test_case, uint64_t seed) {
  torch::manual_seed(seed);
  if (test_case.model == "mlp") return std::make_shared<Mlp>();
  return std::make_shared<TinyGpt>();
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Case& test_case, Model& model) {
  if (test_case.optimizer == "sgd") {
    return std::make_unique<torch::optim::SGD>(model.parameters(),
                                               torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  return std::make_unique<torch::optim::AdamW>(model.parameters(),
                                               torch::optim::AdamWOptions(0.003));
}

Snapshot copies_of(const std::vector<Tensor>& tensors) {
  Snapshot copies;
  for (const Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

Snapshot gradients_of(const Model& model) {
  Snapshot gradients;
  for (const Tensor& parameter : model.parameters()) gradients.push_back(parameter.grad());
  return copies_of(gradients);
}

// `forward(batch)` runs the model on this rank's rows of a batch and returns their loss.
Training train(const Case& test_case, Model& model, const std::vector<Tensor>& batches,
               const std::function<Tensor(const Tensor&)>& loss_of_batch) {
  Training training;
  const auto optimizer = make_optimizer(test_case, model);
  for (const Tensor& batch : batches) {
    optimizer->zero_grad();
    loss_of_batch(batch).backward();
    if (training.first_gradients.empty()) training.first_gradients = gradients_of(model);
    optimizer->step();
  }
  training.parameters = copies_of(model.parameters());
  return training;
}

// The largest |a - b| over the largest |b| of any tensor.
double relative_difference(const Snapshot& a, const Snapshot& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double scale = b[i].abs().max().item<double>();
    largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>() / scale);
  }
  return largest;
}

std::string bits_of(const Snapshot& tensors) {
  std::string bits;
  for (const Tensor& tensor : tensors) {
    bits.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return bits;
}

std::vector<Tensor> make_batches(const Case& test_case) {
  const auto source = make_model(test_case, 1);
  torch::manual_seed(99);
  std::vector<Tensor> batches;
  for (int step = 0; step < kSteps; ++step) batches.push_back(source->make_batch(test_case.batch));
  return batches;
}

Training train_alone(const Case& test_case, const std::vector<Tensor>& batches) {
  const auto model = make_model(test_case, 1);
  return train(test_case, *model, batches,
               [&](const Tensor& batch) { return model->loss(model->forward(batch), batch); });
}

// By rank. Every rank starts from weights of its own, so only the broadcast makes them equal.
std::vector<Training> train_on_ranks(const Case& test_case, const std::vector<Tensor>& batches,
                                     int world_size, Fault fault = Fault::kNone) {
  std::vector<std::shared_ptr<Model>> models;
  for (int rank = 0; rank < world_size; ++rank) {
    models.push_back(make_model(test_case, 1 + static_cast<uint64_t>(rank)));
  }
  std::vector<Training> trained(static_cast<size_t>(world_size));
  const bool is_even = test_case.batch % world_size == 0;
  const auto result = run_groups(world_size, [&](const ProcessGroup& group, std::string&) {
    const std::shared_ptr<Model> module = models[group.rank()];
    DistributedDataParallel model{
        module,
        std::make_shared<FaultyReplicas>(group, fault),
        {.weighting = is_even ? GradientWeighting::kEqual : GradientWeighting::kSamples,
         .bucket_caps = {.first_bytes = 512, .bytes = 2048}}};
    const Share share = share_of(test_case.batch, group.rank(), group.world_size());
    trained[group.rank()] = train(test_case, *module, batches, [&](const Tensor& batch) {
      const Tensor rows = batch.narrow(0, share.begin, share.size());
      if (!is_even) model.set_num_samples(share.size());
      return module->loss(model(rows), rows);
    });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return trained;
}

class DdpEquality : public ::testing::TestWithParam<Case> {};

TEST_P(DdpEquality, EqualsOneProcessOnEveryNumberOfRanks) {
  const auto batches = make_batches(GetParam());
  const Training alone = train_alone(GetParam(), batches);
  for (const int world_size : {1, 2, 3, 4}) {
    const auto trained = train_on_ranks(GetParam(), batches, world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      const std::string where = std::to_string(world_size) + " ranks, rank " + std::to_string(rank);
      ASSERT_EQ(trained[rank].parameters.size(), alone.parameters.size()) << where;
      EXPECT_LE(relative_difference(trained[rank].first_gradients, alone.first_gradients),
                kTolerance)
          << where;
      EXPECT_LE(relative_difference(trained[rank].parameters, alone.parameters), kTolerance)
          << where;
      EXPECT_EQ(bits_of(trained[rank].parameters), bits_of(trained[0].parameters)) << where;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, DdpEquality,
                         ::testing::Values(Case{"mlp", "sgd", 48}, Case{"mlp", "sgd", 25},
                                           Case{"mlp", "adamw", 48}, Case{"mlp", "adamw", 25},
                                           Case{"gpt", "sgd", 48}, Case{"gpt", "sgd", 25},
                                           Case{"gpt", "adamw", 48}, Case{"gpt", "adamw", 25}),
                         ::testing::PrintToStringParamName());

TEST(DdpDeterminism, TwoRunsGiveTheSameBits) {
  const Case test_case{"gpt", "adamw", 25};
  const auto batches = make_batches(test_case);
  const auto first = train_on_ranks(test_case, batches, 3);
  const auto second = train_on_ranks(test_case, batches, 3);
  EXPECT_EQ(bits_of(first[1].parameters), bits_of(second[2].parameters));
}

// The mutation check: each fault must move the result beyond the tolerance, else the equality
// proves nothing.
class DdpEqualityNotices : public ::testing::TestWithParam<Fault> {};

TEST_P(DdpEqualityNotices, TheFault) {
  const Case test_case{"mlp", "sgd", 48};
  const auto batches = make_batches(test_case);
  const Training alone = train_alone(test_case, batches);
  const auto trained = train_on_ranks(test_case, batches, 2, GetParam());
  double difference = 0;
  double first_difference = 0;
  for (const Training& rank : trained) {
    difference = std::max(difference, relative_difference(rank.parameters, alone.parameters));
    first_difference = std::max(first_difference,
                                relative_difference(rank.first_gradients, alone.first_gradients));
  }
  EXPECT_GT(difference, 1e3 * kTolerance);
  EXPECT_GT(first_difference, 1e3 * kTolerance);
}

INSTANTIATE_TEST_SUITE_P(Faults, DdpEqualityNotices,
                         ::testing::Values(Fault::kNoDivision, Fault::kDroppedBucket,
                                           Fault::kNoInitialBroadcast),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace cadre
