// Trains modules that are divided by tensor parallelism on the late device, and compares losses,
// gradients and parameters with those of one process on the CPU. Delays of the kernels make a
// missing order of two streams a wrong number.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/counter_based_dropout.h"
#include "cadre/parallel/layers/embedding.h"
#include "cadre/parallel/layers/linear.h"
#include "cadre/parallel/layers/vocab_parallel_cross_entropy.h"
#include "cadre/tensor/group/backward/differentiable.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "cadre/testing/torch/tp_models.h"
#include "divided_training.h"
#include "on_devices.h"

namespace cadre {
namespace {

namespace late = testing::late;
using std::chrono::microseconds;
using testing::Case;
using testing::DeviceEngine;
using testing::DividedDims;
using testing::DividedModel;
using testing::DividedTraining;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::make_divided_model;
using testing::parameters_of;
using testing::require;
using testing::train_divided;
using torch::Tensor;

constexpr int kNumBatches = 3;

DividedTraining train_model(DividedModel& model, const std::vector<Tensor>& batches) {
  return train_divided(parameters_of(model), batches, [&](const Tensor& batch) {
    ++model.stream->step;
    return model.loss(model.forward(batch), batch);
  });
}

class TensorParallelOnDevicesTest : public testing::OnDevices {
 protected:
  DividedTraining trained_on_devices(const Case& of, int num_ranks, uint64_t seed,
                                     const std::vector<Tensor>& batches) {
    std::vector<std::shared_ptr<DividedModel>> models;
    for (int rank = 0; rank < num_ranks; ++rank) {
      // All ranks start with the weights of rank 0.
      models.push_back(make_divided_model(of, seed + static_cast<uint64_t>(rank)));
    }
    std::vector<DividedTraining> trained(models.size());
    std::vector<DividedDims> dims(models.size());
    const auto result =
        run_on_all(num_ranks, [&](const ProcessGroup& group, const c10::Device& device) {
          const auto rank = static_cast<size_t>(group.rank());
          const auto model = std::move(models[rank]);
          model->to(device);
          const DeviceMesh mesh(group, {{"tp", num_ranks}});
          for (const ParameterShard& record : parallelize_module(*model, mesh, model->plan())) {
            const Shard* const shard = record.placements[0].shard();
            dims[rank].push_back(shard == nullptr ? std::nullopt : std::optional(shard->dim));
          }
          model->group = mesh.group("tp");
          trained[rank] = train_model(*model, testing::moved_to(batches, device));
        });
    EXPECT_TRUE(result.ok()) << result.failures();
    if (!result.ok()) return {};
    return testing::joined(dims[0], trained);
  }

  void expect_one_process(const Case& of, const std::vector<int>& worlds,
                          const std::vector<uint64_t>& seeds) {
    constexpr uint64_t kSeed = 1;
    const auto plain = make_divided_model(of, kSeed);
    std::vector<Tensor> batches;
    for (int i = 0; i < kNumBatches; ++i) batches.push_back(plain->make_batch(of.batch));
    const DividedTraining alone = train_model(*plain, batches);
    for (const uint64_t seed : seeds) {
      late::set_delays({.longest = microseconds(seed == 0 ? 0 : 200), .seed = seed});
      for (const int num_ranks : worlds) {
        const DividedTraining trained = trained_on_devices(of, num_ranks, kSeed, batches);
        EXPECT_EQ(failure_of([&] { testing::require_close(trained, alone); }), "")
            << of << ", " << num_ranks << " ranks, seed " << seed;
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, TensorParallelOnDevicesTest,
                         ::testing::Values(DeviceEngine::kEnqueues, DeviceEngine::kStaged),
                         [](const auto& test) { return testing::name_of(test.param); });

TEST_P(TensorParallelOnDevicesTest, EveryModelTrainsAsInOneProcess) {
  struct Divided {
    const char* model;
    int num_ranks;
  };
  std::vector<Divided> all = {{"gpt_tied", 1}};
  for (const char* model :
       {"mlp", "gpt_tied", "gpt_untied", "gpt_tied_sequence", "gpt_untied_sequence"}) {
    for (const int num_ranks : {2, 3}) all.push_back({model, num_ranks});
  }
  for (const auto& [model, num_ranks] : share_on_engine(all)) {
    expect_one_process({model, "sgd", 2, torch::kDouble}, {num_ranks}, {0});
  }
}

TEST_P(TensorParallelOnDevicesTest, DelaysOfKernelsChangeNoNumber) {
  expect_one_process({"mlp", "sgd", 4, torch::kDouble}, {2},
                     share_on_engine(testing::test_seeds(10)));
  expect_one_process({"gpt_tied_sequence", "sgd", 2, torch::kDouble}, {2},
                     share_on_engine(testing::test_seeds(2)));
}

// Some ranks have no row of the table, because it has fewer rows than there are ranks.
TEST_P(TensorParallelOnDevicesTest, RanksWithoutAPartOfTheVocabularyTakePart) {
  const Tensor table = torch::sin(torch::arange(8, torch::kDouble)).view({2, 4});
  const Tensor indices = torch::tensor({{0, 1, 1}, {1, 0, 1}}, torch::kLong);
  const Tensor targets = torch::tensor({{1, 0, -100}, {0, 1, 1}}, torch::kLong);
  torch::nn::Embedding plain(torch::nn::EmbeddingOptions(2, 4).padding_idx(1));
  plain->to(torch::kDouble);
  const auto fill = [&](Tensor weight, const Tensor& values) {
    const torch::NoGradGuard no_grad;
    weight.copy_(values);
  };
  fill(plain->weight, table);
  const Tensor logits = torch::linear(plain(indices), table);
  const Tensor expected =
      torch::nn::functional::cross_entropy(logits.view({-1, 2}), targets.view({-1}));
  expected.backward();
  expect_on_all(3, [&](const ProcessGroup& group, const c10::Device& device) {
    VocabParallelEmbedding divided(torch::nn::EmbeddingOptions(2, 4).padding_idx(1), group);
    divided->to(torch::kDouble);
    const int64_t rows = divided->weight.size(0);
    require(rows == (group.rank() < 2 ? 1 : 0), "one row on each of the first ranks");
    const Tensor own = table.narrow(0, group.rank(), rows);
    fill(divided->weight, own);
    divided->to(device);
    const Tensor part = torch::linear(functional::copy_to_group(divided(indices.to(device)), group),
                                      own.to(device));
    const Tensor loss =
        vocab_parallel_cross_entropy(part, targets.to(device), group, {.vocabulary = 2});
    loss.backward();
    require(torch::allclose(loss.detach().cpu(), expected.detach(), 1e-12, 1e-14), "the loss");
    require(torch::allclose(divided->weight.grad().cpu(),
                            plain->weight.grad().narrow(0, group.rank(), rows), 1e-12, 1e-14),
            "the gradient");
  });
}

class EnqueuedTensorParallelTest : public TensorParallelOnDevicesTest {};
INSTANTIATE_TEST_SUITE_P(Devices, EnqueuedTensorParallelTest,
                         ::testing::Values(DeviceEngine::kEnqueues));

TEST_P(EnqueuedTensorParallelTest, DropoutHasTheBitsOfTheCpu) {
  const DropoutStream stream{.seed = 0xfedcba9876543210,
                             .step = 7,
                             .first_sample = (int64_t{1} << 32) - 2,
                             .sample_stride = 3};
  struct Region {
    std::vector<int64_t> sizes;
    DropoutRegion region;
  };
  const std::vector<Region> regions = {
      {{5}, {}},
      {{4, 1}, {}},
      {{3, 7}, {}},
      {{2, 3, 5, 6}, {}},
      {{2, 3, 5, 6}, {.sizes = {7, 9, 21}, .offsets = {4, 2, 13}}},
      {{2, 4}, {.sizes = {int64_t{1} << 34}, .offsets = {(int64_t{1} << 34) - 5}}},
      {{2, 2, 3}, {.sizes = {int64_t{1} << 32, 3}, .offsets = {(int64_t{1} << 32) - 2, 0}}},
      {{2, 0, 3}, {}}};
  const c10::Device device = late::device(0);
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    for (const double p : {0.1, 0.5, 1.0}) {
      for (const Region& of : regions) {
        Tensor x = torch::randn(of.sizes, torch::kDouble).to(dtype).requires_grad_();
        Tensor late_x = x.detach().to(device).requires_grad_();
        const Tensor expected = counter_based_dropout(x, p, stream, 5, of.region);
        const Tensor found = counter_based_dropout(late_x, p, stream, 5, of.region);
        EXPECT_TRUE(torch::equal(found.cpu(), expected)) << expected << found.cpu();
        const Tensor weight = torch::randn(of.sizes, torch::kDouble).to(dtype);
        expected.backward(weight);
        found.backward(weight.to(device));
        EXPECT_TRUE(torch::equal(late_x.grad().cpu(), x.grad()));
      }
    }
  }
}

TEST_P(EnqueuedTensorParallelTest, AStepNeverWaitsForTheDevice) {
  const Case of{"gpt_tied_sequence", "sgd", 2, torch::kFloat};
  std::vector<std::shared_ptr<DividedModel>> models = {make_divided_model(of, 1),
                                                       make_divided_model(of, 1)};
  const Tensor batch = models[0]->make_batch(2);
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const auto model = std::move(models[static_cast<size_t>(group.rank())]);
    model->to(device);
    parallelize_module(*model, group, model->plan());
    model->group = group;
    torch::optim::SGD optimizer(parameters_of(*model), testing::sgd_options());
    const Tensor own = batch.to(device);
    late::Counts before;
    for (int step = 0; step < 4; ++step) {
      if (step == 2) before = late::counts(group.rank());
      optimizer.zero_grad();
      ++model->stream->step;
      model->loss(model->forward(own), own).backward();
      optimizer.step();
    }
    const std::string waits = testing::waits_since(before, group.rank());
    require(waits.empty(), waits);
  });
}

TEST_P(TensorParallelOnDevicesTest, ModulesElsewhereAreRefusedOnAllRanks) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const c10::Device elsewhere = late::device(6);
    const auto net = std::make_shared<testing::DividedMlp>();
    net->to(group.rank() == 1 ? elsewhere : device);
    const std::string failure = failure_of([&] { parallelize_module(*net, group, net->plan()); });
    testing::require_refusal(failure, "is on " + elsewhere.str());
    const auto mixed = std::make_shared<testing::DividedMlp>();
    mixed->first->to(device);
    const std::string two = failure_of([&] { parallelize_module(*mixed, group, mixed->plan()); });
    require(two.find("move the module to one device") != std::string::npos, two);
  });
}

// A wrong index is an error of the device, which the next call that waits for the device reports,
// as for torch::nn::Embedding.
TEST_P(TensorParallelOnDevicesTest, AnIndexOutsideTheVocabularyFailsOnTheDevice) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    VocabParallelEmbedding embedding(torch::nn::EmbeddingOptions(4, 3), group);
    embedding->to(device);
    const Tensor indices = torch::tensor({1, 4}, torch::kLong).to(device);
    const std::string failure = failure_of([&] { embedding(indices).cpu(); });
    require(failure.find("not one of the 4 entries") != std::string::npos, failure);
  });
}

}  // namespace
}  // namespace cadre
