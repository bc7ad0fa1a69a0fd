// Trains models whose sequence is divided among ranks on the late device, also together with tensor
// parallelism, and compares losses, gradients and parameters with those of one process on the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/core/ranks.h"
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
using testing::DividedGpt;
using testing::DividedModel;
using testing::DividedTraining;
using testing::failure_of;
using testing::make_divided_model;
using testing::parameters_of;
using testing::require;
using testing::train_divided;
using torch::Tensor;

struct Division {
  int context;
  int tensor;
  ContextForm form;
  SequenceOrder order;
};

DividedTraining train_shared(DividedModel& model, const std::vector<Tensor>& batches) {
  return train_divided(
      parameters_of(model), batches,
      [&](const Tensor& batch) {
        ++model.stream->step;
        return model.loss(model.forward(batch), batch);
      },
      [&] {
        if (model.context) model.context->sum_gradients(parameters_of(model));
      });
}

class ContextParallelOnDevicesTest : public testing::OnDevices {
 protected:
  DividedTraining trained_on_devices(const Case& of, const Division& division,
                                     const std::vector<Tensor>& batches) {
    const int num_ranks = division.context * division.tensor;
    std::vector<std::shared_ptr<DividedModel>> models;
    for (int rank = 0; rank < num_ranks; ++rank) models.push_back(make_divided_model(of, 1));
    std::vector<DividedTraining> trained(models.size());
    std::vector<DividedDims> dims(models.size());
    const auto result = run_on_all(num_ranks, [&](const ProcessGroup& group,
                                                  const c10::Device& device) {
      const auto rank = static_cast<size_t>(group.rank());
      const auto model = std::move(models[rank]);
      model->to(device);
      const DeviceMesh mesh(group, {{"cp", division.context}, {"tp", division.tensor}});
      for (const ParameterShard& record : parallelize_module(*model, mesh["tp"], model->plan())) {
        const Shard* const shard = record.placements[0].shard();
        dims[rank].push_back(shard == nullptr ? std::nullopt : std::optional(shard->dim));
      }
      model->group = mesh.group("tp");
      model->context.emplace(
          mesh.group("cp"),
          ContextParallelOptions{
              .num_tokens = DividedGpt::kTokens, .form = division.form, .order = division.order});
      set_context_parallel(*model, *model->context);
      trained[rank] = train_shared(*model, testing::moved_to(batches, device));
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    if (!result.ok()) return {};
    trained.resize(static_cast<size_t>(division.tensor));
    return testing::joined(dims[0], trained);
  }

  void expect_one_process(const std::string& name, const Division& division,
                          const std::vector<uint64_t>& seeds) {
    const Case of{name, "sgd", 2, torch::kDouble};
    const auto plain = make_divided_model(of, 1);
    const std::vector<Tensor> batches = {plain->make_batch(2), plain->make_batch(2)};
    const DividedTraining alone = train_shared(*plain, batches);
    for (const uint64_t seed : seeds) {
      late::set_delays({.longest = microseconds(seed == 0 ? 0 : 50), .seed = seed});
      const DividedTraining trained = trained_on_devices(of, division, batches);
      EXPECT_EQ(failure_of([&] { testing::require_close(trained, alone); }), "")
          << name << ", " << division.context << " x " << division.tensor << ", "
          << to_string(division.form) << ", " << to_string(division.order) << ", seed " << seed;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, ContextParallelOnDevicesTest,
                         ::testing::Values(DeviceEngine::kEnqueues, DeviceEngine::kStaged),
                         [](const auto& test) { return testing::name_of(test.param); });

TEST_P(ContextParallelOnDevicesTest, EveryFormTrainsAsOneProcess) {
  for (const auto form : {ContextForm::kRing, ContextForm::kAllToAll}) {
    for (const auto order : {SequenceOrder::kContiguous, SequenceOrder::kZigzag}) {
      expect_one_process("gpt_tied", {order == SequenceOrder::kZigzag ? 3 : 2, 1, form, order},
                         {0});
    }
    expect_one_process("gpt_untied_sequence", {2, 2, form, SequenceOrder::kZigzag}, {0});
  }
}

TEST_P(ContextParallelOnDevicesTest, DelaysOfKernelsChangeNoNumber) {
  expect_one_process("gpt_tied", {2, 1, ContextForm::kRing, SequenceOrder::kZigzag},
                     {1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  expect_one_process("gpt_tied", {2, 1, ContextForm::kAllToAll, SequenceOrder::kContiguous}, {1});
}

TEST_P(ContextParallelOnDevicesTest, PositionsAndUnshardedTensorsAreOnTheDevice) {
  expect_on_all(3, [](const ProcessGroup& group, const c10::Device& device) {
    const ContextParallel context(group, {.num_tokens = 7, .order = SequenceOrder::kZigzag});
    const Tensor whole = torch::arange(14, torch::kDouble).view({2, 7});
    const Tensor own = context.shard(whole.to(device), 1);
    require(context.positions(device).device() == device, "the device of the positions");
    require(torch::equal(context.positions(device).cpu(), context.positions()), "the positions");
    require(torch::equal(context.unshard(own, 1).cpu(), whole), "the whole tensor");
  });
}

}  // namespace
}  // namespace cadre
