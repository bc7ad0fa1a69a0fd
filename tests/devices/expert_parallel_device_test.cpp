// Trains mixtures of experts that are divided among ranks on the late device, and compares losses,
// gradients and parameters with those of one process on the CPU with the whole batch.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/ep_models.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "divided_training.h"
#include "on_devices.h"

namespace cadre {
namespace {

namespace late = testing::late;
using std::chrono::microseconds;
using testing::Case;
using testing::Degrees;
using testing::DeviceEngine;
using testing::DividedTraining;
using testing::ExpertModel;
using testing::failure_of;
using testing::make_expert_model;
using testing::parameters_of;
using testing::require;
using testing::train_divided;
using torch::Tensor;

DividedTraining train_model(ExpertModel& model, const std::vector<Tensor>& batches) {
  return train_divided(
      parameters_of(model), batches,
      [&](const Tensor& batch) { return model.loss(model.forward(batch), batch); },
      [&] {
        if (model.experts != nullptr) model.experts->sum_gradients();
      });
}

class ExpertParallelOnDevicesTest : public testing::OnDevices {
 protected:
  DividedTraining trained_on_devices(const Case& of, const Degrees& degrees,
                                     const std::vector<Tensor>& batches) {
    const int num_ranks = degrees.dp * degrees.ep;
    std::vector<std::shared_ptr<ExpertModel>> models;
    for (int rank = 0; rank < num_ranks; ++rank) {
      models.push_back(make_expert_model(of, 1 + static_cast<uint64_t>(rank)));
    }
    std::vector<DividedTraining> trained(models.size());
    std::vector<testing::DividedDims> dims(models.size());
    const auto result =
        run_on_all(num_ranks, [&](const ProcessGroup& group, const c10::Device& device) {
          const auto rank = static_cast<size_t>(group.rank());
          const auto model = std::move(models[rank]);
          model->to(device);
          const DeviceMesh mesh(group, {{"dp", degrees.dp}, {"ep", degrees.ep}});
          const ExpertParallel experts(*model, mesh);
          model->experts = &experts;
          for (const ParameterShard& record : experts.parameter_shards()) {
            const bool is_divided = record.placements[1].shard() != nullptr;
            dims[rank].push_back(is_divided ? std::optional<int64_t>(0) : std::nullopt);
          }
          std::vector<Tensor> own;
          for (const Tensor& batch : batches) {
            const auto share = testing::share_of(batch.size(0), group.rank(), num_ranks);
            own.push_back(batch.narrow(0, share.begin, share.size()).to(device));
          }
          trained[rank] = train_model(*model, own);
        });
    EXPECT_TRUE(result.ok()) << result.failures();
    if (!result.ok()) return {};
    trained.resize(static_cast<size_t>(degrees.ep));
    return testing::joined(dims[0], trained);
  }

  void expect_one_process(const std::string& name, const std::vector<Degrees>& divisions,
                          const std::vector<uint64_t>& seeds) {
    const Case of{name, "sgd", name == "mlp" ? 25 : 5, torch::kDouble};
    const auto plain = make_expert_model(of, 1);
    const std::vector<Tensor> batches = {plain->make_batch(of.batch), plain->make_batch(of.batch),
                                         plain->make_batch(of.batch)};
    const DividedTraining alone = train_model(*plain, batches);
    for (const uint64_t seed : seeds) {
      late::set_delays({.longest = microseconds(seed == 0 ? 0 : 200), .seed = seed});
      for (const Degrees& degrees : divisions) {
        const DividedTraining trained = trained_on_devices(of, degrees, batches);
        EXPECT_EQ(failure_of([&] { testing::require_close(trained, alone); }), "")
            << name << ", dp " << degrees.dp << ", ep " << degrees.ep << ", seed " << seed;
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, ExpertParallelOnDevicesTest,
                         ::testing::Values(DeviceEngine::kEnqueues, DeviceEngine::kStaged),
                         [](const auto& test) { return testing::name_of(test.param); });

TEST_P(ExpertParallelOnDevicesTest, EveryModelTrainsAsOneProcess) {
  std::vector<std::pair<std::string, Degrees>> all;
  for (const char* model : {"mlp", "gpt"}) {
    for (const Degrees& degrees : {Degrees{1, 1}, {1, 2}, {1, 4}, {2, 2}}) {
      all.emplace_back(model, degrees);
    }
  }
  for (const auto& [model, degrees] : share_on_engine(all)) {
    expect_one_process(model, {degrees}, {0});
  }
}

TEST_P(ExpertParallelOnDevicesTest, DelaysOfKernelsChangeNoNumber) {
  expect_one_process("mlp", {{1, 2}}, share_on_engine(testing::test_seeds(10)));
  expect_one_process("gpt", {{2, 2}}, {1});
}

// Each forward waits for the choices of the router, once, and for nothing else.
TEST_P(ExpertParallelOnDevicesTest, AForwardWaitsForTheDeviceOnce) {
  if (GetParam() == DeviceEngine::kStaged) return;  // every collective of this engine waits
  expect_on_all(2, [](const ProcessGroup& group, const c10::Device& device) {
    MixtureOfExperts experts(
        MixtureOfExpertsOptions{.features = 6, .hidden_features = 5, .num_experts = 4});
    experts->to(device);
    const DeviceMesh mesh(group, {{"ep", 2}});
    const ExpertParallel division(*experts, mesh);
    const Tensor x = torch::sin(torch::arange(30.0)).view({5, 6}).to(device);
    late::Counts before = late::counts(group.rank());
    for (int step = 0; step < 3; ++step) {
      const MixtureOfExpertsOutput output = experts(x);
      require(output.statistics.choices_of_expert.is_cpu(), "the statistics");
      (output.values.sum() + output.losses.weighted({})).backward();
    }
    const late::Counts after = late::counts(group.rank());
    require(after.num_synchronous() == before.num_synchronous() + 3,
            format("{} waits", after.num_synchronous() - before.num_synchronous()));
    require(after.waits == before.waits, "a wait for a stream");
    mesh.close();
  });
}

}  // namespace
}  // namespace cadre
