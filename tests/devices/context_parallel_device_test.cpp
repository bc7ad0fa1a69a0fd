// Trains models whose sequence is divided among ranks on the late device, also together with tensor
// parallelism, and compares losses, gradients and parameters with those of one process on the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/attention/context_parallel_attention.h"
#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/parallel/layers/vocab_parallel_cross_entropy.h"
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
using testing::DividedGpt;
using testing::DividedModel;
using testing::DividedTraining;
using testing::failure_of;
using testing::make_divided_model;
using testing::parameters_of;
using testing::require;
using testing::train_divided;
using torch::Tensor;

struct SequenceDivision {
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
  DividedTraining trained_on_devices(const Case& of, const SequenceDivision& division,
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

  void expect_one_process(const std::string& name, const SequenceDivision& division,
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
  std::vector<std::pair<std::string, SequenceDivision>> all;
  for (const auto form : {ContextForm::kRing, ContextForm::kAllToAll}) {
    all.push_back({"gpt_tied", {2, 1, form, SequenceOrder::kContiguous}});
    all.push_back({"gpt_tied", {3, 1, form, SequenceOrder::kZigzag}});
    all.push_back({"gpt_untied_sequence", {2, 2, form, SequenceOrder::kZigzag}});
  }
  for (const auto& [name, division] : share_on_engine(all)) expect_one_process(name, division, {0});
}

TEST_P(ContextParallelOnDevicesTest, DelaysOfKernelsChangeNoNumber) {
  const Tensor whole = torch::sin(torch::arange(2 * 4 * 11 * 3, torch::kDouble).square());
  const Tensor x = whole.view({2, 4, 11, 3}).clone().requires_grad_();
  const auto attend = [](const Tensor& heads, const auto& attention) {
    return attention(heads * 2, heads.sin(), heads + 1);
  };
  const Tensor expected =
      attend(x, [](const Tensor& query, const Tensor& key, const Tensor& value) {
        return torch::scaled_dot_product_attention(query, key, value, {}, 0.0, /*is_causal=*/true);
      });
  expected.square().sum().backward();
  for (const uint64_t seed : share_on_engine(testing::test_seeds(10))) {
    late::set_delays({.longest = microseconds(200), .seed = seed});
    for (const auto form : {ContextForm::kRing, ContextForm::kAllToAll}) {
      SCOPED_TRACE(format("{}, seed {}", to_string(form), seed));
      expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
        const ContextParallel context(group, {.num_tokens = 11, .form = form});
        const Tensor own = context.shard(x.detach(), 2).to(device).requires_grad_();
        const Tensor found =
            attend(own, [&](const Tensor& query, const Tensor& key, const Tensor& value) {
              return context_parallel_attention(query, key, value, context, {.is_causal = true});
            });
        found.square().sum().backward();
        testing::require_close(testing::on_cpu({found, own.grad()}),
                               {context.shard(expected.detach(), 2), context.shard(x.grad(), 2)},
                               "output and gradient");
      });
    }
  }
  expect_one_process("gpt_tied", {2, 1, ContextForm::kRing, SequenceOrder::kZigzag}, {1});
}

// The host waits for the messages of the ring, but never for the device.
TEST_P(ContextParallelOnDevicesTest, AttentionNeverWaitsForTheDevice) {
  if (GetParam() == DeviceEngine::kStaged) return;  // every collective of this engine waits
  for (const auto form : {ContextForm::kRing, ContextForm::kAllToAll}) {
    expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
      const ContextParallel context(
          group, {.num_tokens = 10, .form = form, .order = SequenceOrder::kContiguous});
      const Tensor x = torch::sin(torch::arange(2 * 4 * 5 * 3, torch::kFloat)).view({2, 4, 5, 3});
      const Tensor query = x.to(device).requires_grad_();
      const late::Counts before = late::counts(group.rank());
      for (int i = 0; i < 3; ++i) {
        const Tensor output =
            context_parallel_attention(query, query * 2, query + 1, context, {.is_causal = true});
        output.sum().backward();
      }
      const late::Counts after = late::counts(group.rank());
      require(after.num_synchronous() == before.num_synchronous(), "a synchronous operation");
      require(after.waits == before.waits, format("{} waits", after.waits - before.waits));
      require(query.grad().cpu().isfinite().all().item<bool>(), "the gradient");
    });
  }
}

// The ranks have unequal numbers of tokens that count, which the host does not read.
TEST_P(ContextParallelOnDevicesTest, TheMeanOverATokenGroupIsThatOfAllTokens) {
  const Tensor logits = torch::sin(torch::arange(8 * 5, torch::kDouble)).view({8, 5});
  const Tensor targets = torch::tensor({1, -100, 4, 0, -100, -100, 3, -100}, torch::kLong);
  const Tensor whole = logits.clone().requires_grad_();
  const Tensor expected = torch::nn::functional::cross_entropy(whole, targets);
  expected.backward();
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const DeviceMesh mesh(group, {{"cp", 2}, {"tp", 1}});
    const int64_t begin = 4 * group.rank();
    const Tensor own = logits.narrow(0, begin, 4).to(device).requires_grad_();
    const Tensor own_targets = targets.narrow(0, begin, 4).to(device);
    const ProcessGroup& tensor_ranks = mesh.group("tp");
    const VocabParallelCrossEntropyOptions options{.vocabulary = 5,
                                                   .token_group = mesh.group("cp")};
    const late::Counts before = late::counts(group.rank());
    const Tensor loss = vocab_parallel_cross_entropy(own, own_targets, tensor_ranks, options);
    loss.backward();
    const late::Counts after = late::counts(group.rank());
    require(after.num_synchronous() == before.num_synchronous(), "a synchronous operation");
    require(torch::allclose(loss.detach().cpu(), expected.detach(), 1e-12, 1e-14), "the loss");
    require(torch::allclose(own.grad().cpu(), whole.grad().narrow(0, begin, 4), 1e-12, 1e-14),
            "the gradient");
    const Tensor wrong = group.rank() == 1 ? own.narrow(1, 0, 4) : own;
    const std::string failure = failure_of(
        [&] { vocab_parallel_cross_entropy(wrong, own_targets, tensor_ranks, options); });
    require(failure.find("are not this rank's 5 of the 5 classes") != std::string::npos, failure);
    mesh.close();
  });
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
