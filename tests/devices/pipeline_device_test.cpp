// Trains pipelines whose stages are on late devices, and compares losses, gradients, parameters and
// outputs with those of one process on the CPU with whole batches.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/schedule/generate.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "cadre/testing/torch/pp_model.h"
#include "divided_training.h"
#include "on_devices.h"

namespace cadre {
namespace {

namespace late = testing::late;
using std::chrono::microseconds;
using testing::all_stages;
using testing::cross_entropy;
using testing::DeviceEngine;
using testing::failure_of;
using testing::forward_all;
using ::testing::HasSubstr;
using testing::require;
using testing::StageNet;
using testing::targets_of;
using testing::tokens_of;
using torch::Tensor;

constexpr int kNumSteps = 3;
constexpr int kAccumulatedStep = 1;  // adds its gradients to those of the step before
constexpr int64_t kRows = 7;         // of each replica; no multiple of the number of microbatches

torch::optim::SGDOptions stage_options() {
  return torch::optim::SGDOptions(0.05).momentum(0.9);
}

struct Alone {
  std::vector<Tensor> losses;
  std::vector<testing::Snapshot> parameters;  // of each stage
  Tensor logits;

  // Returns all parameters in the order of Pipeline::parameter_shards(), where the tied one is
  // first. If a rank has both stages of the tie, the last stage has a copy of it.
  testing::Snapshot of_all_stages(bool has_copy) const {
    testing::Snapshot values;
    const auto num_stages = static_cast<int>(parameters.size());
    for (int stage = 0; stage < num_stages; ++stage) {
      const auto items = StageNet(stage, num_stages).named_parameters();
      for (size_t i = 0; i < items.size(); ++i) {
        if (items[i].key() == "head" && !has_copy) continue;
        values.push_back(parameters[static_cast<size_t>(stage)][i]);
      }
    }
    return values;
  }
};

// Trains the tied model in one process.
Alone trained_alone(int num_stages, int num_replicas) {
  const auto stages = all_stages(num_stages);
  stages.back()->head = stages[0]->table;
  std::vector<Tensor> trained;
  for (const auto& stage : stages) {
    for (const auto& parameter : stage->named_parameters()) {
      if (parameter.key() != "head" && parameter.value().requires_grad()) {
        trained.push_back(parameter.value());
      }
    }
  }
  torch::optim::SGD optimizer(trained, stage_options());
  Alone alone;
  for (int step = 0; step < kNumSteps; ++step) {
    const Tensor tokens = tokens_of(kRows * num_replicas, step);
    if (step != kAccumulatedStep) optimizer.zero_grad();
    const Tensor loss = cross_entropy(forward_all(stages, tokens), targets_of(tokens));
    loss.backward();
    alone.losses.push_back(loss.detach());
    optimizer.step();
  }
  const torch::NoGradGuard no_grad;
  alone.logits = forward_all(stages, tokens_of(kRows * num_replicas, 50));
  for (const auto& stage : stages) {
    testing::Snapshot values;
    for (const auto& parameter : stage->named_parameters()) {
      values.push_back(parameter.key() == "head" ? stages[0]->table.detach()
                                                 : parameter.value().detach());
    }
    alone.parameters.push_back(values);
  }
  return alone;
}

class PipelineOnDevicesTest : public testing::OnDevices {
 protected:
  struct Place {
    ProcessGroup group;
    std::optional<ProcessGroup> replicas = {};
    c10::Device device;
    std::optional<DeviceMesh> mesh = {};  // has the axes dp and pp
    bool is_sharded = false;              // along dp, instead of replicas
  };

  // Every rank gathers the parameters of all stages, those that it does not have among them.
  static void require_gathered(const Pipeline& pipeline, const Alone& alone) {
    testing::Snapshot values;
    for (const NamedTensor& whole : shard::gather_values(pipeline.parameter_shards())) {
      values.push_back(whole.tensor.cpu());
    }
    const bool has_copy =
        pipeline.schedule().rank_of_stage.front() == pipeline.schedule().rank_of_stage.back();
    testing::require_close(values, alone.of_all_stages(has_copy), "gathered parameter");
  }

  static void train_rank(const Place& place, const std::string& kind, int stages_per_rank,
                         const Alone& alone) {
    const int num_stages = place.group.world_size() * stages_per_rank;
    const auto schedule = make_pipeline_schedule({find_pipeline_schedule(kind)->kind,
                                                  place.group.world_size(), 4, stages_per_rank})
                              .value_or_throw();
    std::vector<std::shared_ptr<StageNet>> nets;
    std::vector<PipelineStage> stages;
    std::vector<Tensor> trained;
    for (int stage = 0; stage < num_stages; ++stage) {
      if (schedule.rank_of_stage[static_cast<size_t>(stage)] != place.group.rank()) continue;
      nets.push_back(std::make_shared<StageNet>(stage, num_stages));
      nets.back()->to(place.device);
      stages.emplace_back(nets.back(),
                          PipelineStageOptions{.stage = stage, .num_stages = num_stages});
      for (const Tensor& parameter : nets.back()->parameters()) {
        if (parameter.requires_grad()) trained.push_back(parameter);
      }
    }
    PipelineOptions options{.schedule = schedule, .allow_uneven_microbatches = true};
    if (place.is_sharded) {
      options.shards = (*place.mesh)["dp"];
      options.max_unsharded_stages = 1;
    } else if (place.replicas) {
      options.replicas = *place.replicas;
    }
    Pipeline pipeline(stages, place.mesh ? Ranks((*place.mesh)["pp"]) : Ranks(place.group),
                      options);
    pipeline.tie_parameters({{0, "table"}, {num_stages - 1, "head"}});
    torch::optim::SGD optimizer(place.is_sharded ? pipeline.parameters() : trained,
                                stage_options());
    const int num_replicas = place.replicas ? place.replicas->world_size() : 1;
    const int replica = place.replicas ? place.replicas->rank() : 0;
    const auto part_of = [&](const Tensor& whole) {
      return whole.slice(0, kRows * replica, kRows * (replica + 1)).to(place.device);
    };
    for (int step = 0; step < kNumSteps; ++step) {
      const Tensor tokens = part_of(tokens_of(kRows * num_replicas, step));
      if (step != kAccumulatedStep) optimizer.zero_grad();
      const PipelineResult result =
          pipeline.step(tokens, targets_of(tokens), cross_entropy, {.broadcast_losses = true});
      if (num_replicas == 1) {
        testing::require_close({result.loss}, {alone.losses[static_cast<size_t>(step)]}, "loss");
      }
      optimizer.step();
    }
    pipeline.check_tied_parameters();
    const auto evaluated = pipeline.forward(part_of(tokens_of(kRows * num_replicas, 50)));
    if (!evaluated.outputs.empty()) {
      testing::require_close({evaluated.outputs[0].cpu()},
                             {alone.logits.slice(0, kRows * replica, kRows * (replica + 1))},
                             "output");
    }
    if (place.mesh) require_gathered(pipeline, alone);
    if (place.is_sharded) return;
    for (const auto& net : nets) {
      testing::require_close(testing::on_cpu(net->parameters()),
                             alone.parameters[static_cast<size_t>(net->stage)],
                             format("parameter of stage {}", net->stage));
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, PipelineOnDevicesTest,
                         ::testing::Values(DeviceEngine::kEnqueues, DeviceEngine::kStaged),
                         [](const auto& test) { return testing::name_of(test.param); });

TEST_P(PipelineOnDevicesTest, EveryScheduleTrainsAsOneProcess) {
  const auto known = pipeline_schedules();
  for (const PipelineScheduleInfo& info :
       share_on_engine<PipelineScheduleInfo>({known.begin(), known.end()})) {
    for (const int num_ranks : {2, 3}) {
      for (const int per_rank : {1, 2}) {
        if (!make_pipeline_schedule({info.kind, num_ranks, 4, per_rank}).ok()) continue;
        SCOPED_TRACE(format("{}, {} ranks, {} stages each", info.name, num_ranks, per_rank));
        const Alone alone = trained_alone(num_ranks * per_rank, 1);
        expect_on_all(num_ranks, [&](const ProcessGroup& group, const c10::Device& device) {
          train_rank({.group = group, .device = device}, std::string(info.name), per_rank, alone);
        });
        break;
      }
    }
  }
}

TEST_P(PipelineOnDevicesTest, DelaysOfKernelsChangeNoNumber) {
  const Alone alone = trained_alone(2, 1);
  for (const uint64_t seed : share_on_engine(testing::test_seeds(10))) {
    SCOPED_TRACE(format("seed {}", seed));
    late::set_delays({.longest = microseconds(200), .seed = seed});
    expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
      train_rank({.group = group, .device = device}, "1f1b", 1, alone);
    });
  }
}

TEST_P(PipelineOnDevicesTest, ReplicasTrainAsOneProcessOnTheBatchesOfAll) {
  const Alone alone = trained_alone(2, 2);
  late::set_delays({.longest = microseconds(100), .seed = 4});
  expect_on_all(4, [&](const ProcessGroup& world, const c10::Device& device) {
    const DeviceMesh mesh(world, {{"dp", 2}, {"pp", 2}});
    train_rank(
        {.group = mesh.group("pp"), .replicas = mesh.group("dp"), .device = device, .mesh = mesh},
        "1f1b", 1, alone);
    mesh.close();
  });
}

// Also if a rank has both stages of the tie, and stages that it gathers again in the same step.
TEST_P(PipelineOnDevicesTest, ShardedStagesTrainAsOneProcessOnTheBatchesOfAll) {
  for (const auto& [kind, per_rank] :
       {std::pair("1f1b", 1), std::pair("interleaved-1f1b", 2), std::pair("zb-v", 2)}) {
    const Alone alone = trained_alone(2 * per_rank, 2);
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      SCOPED_TRACE(format("{}, seed {}", kind, seed));
      late::set_delays({.longest = microseconds(100), .seed = seed});
      expect_on_all(4, [&, kind = kind, per_rank = per_rank](const ProcessGroup& world,
                                                             const c10::Device& device) {
        const DeviceMesh mesh(world, {{"dp", 2}, {"pp", 2}});
        train_rank({.group = mesh.group("pp"),
                    .replicas = mesh.group("dp"),
                    .device = device,
                    .mesh = mesh,
                    .is_sharded = true},
                   kind, per_rank, alone);
        mesh.close();
      });
    }
  }
}

// The host waits only where it reads the losses of a step, on the rank that has the last stage.
TEST_P(PipelineOnDevicesTest, AStepWaitsForTheDeviceOnceForItsLosses) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const auto net = std::make_shared<StageNet>(group.rank(), 2);
    net->to(device);
    Pipeline pipeline({{net, {.stage = group.rank(), .num_stages = 2}}}, group,
                      {.num_microbatches = 4});
    const Tensor tokens = tokens_of(8, 0).to(device);
    const Tensor targets = targets_of(tokens);
    late::Counts before;
    for (int step = 0; step < 4; ++step) {
      if (step == 2) before = late::counts(group.rank());
      pipeline.step(tokens, targets, cross_entropy);
    }
    const late::Counts after = late::counts(group.rank());
    const uint64_t expected = group.rank() == 1 ? 2 : 0;
    require(
        after.num_synchronous() == before.num_synchronous() + expected,
        format("{} synchronous operations", after.num_synchronous() - before.num_synchronous()));
    require(after.waits == before.waits, format("{} waits", after.waits - before.waits));
  });
}

TEST_P(PipelineOnDevicesTest, AStageElsewhereIsRefusedOnAllRanks) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const c10::Device elsewhere = late::device(6);
    const auto net = std::make_shared<StageNet>(group.rank(), 2);
    net->to(group.rank() == 1 ? elsewhere : device);
    const std::string failure = failure_of([&] {
      Pipeline({{net, {.stage = group.rank(), .num_stages = 2}}}, group, {.num_microbatches = 2});
    });
    require(failure.find("kInvalidArgument") != std::string::npos &&
                failure.find("is on " + elsewhere.str()) != std::string::npos,
            failure);
  });
}

// A stage that throws ends the step on all ranks, as on the CPU.
TEST_P(PipelineOnDevicesTest, AnErrorOfAStageIsNamedOnAllRanks) {
  std::vector<std::string> failures(2);
  static_cast<void>(run_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const Tensor weight = torch::ones({3}, torch::kDouble).to(device).requires_grad_();
    int num_calls = 0;
    const PipelineStage stage(
        [&](const std::vector<Tensor>& x) -> std::vector<Tensor> {
          if (group.rank() == 1 && ++num_calls == 2) throw std::runtime_error("the test throws");
          return {x[0] * weight};
        },
        {{"weight", weight}}, {.stage = group.rank(), .num_stages = 2});
    Pipeline pipeline({stage}, group, {.num_microbatches = 3});
    const Tensor x = torch::ones({6, 3}, torch::kDouble).to(device);
    failures[static_cast<size_t>(group.rank())] = failure_of([&] {
      pipeline.step(x, x, [](const Tensor& y, const Tensor& t) { return (y - t).square().mean(); });
      group.barrier();
    });
  }));
  for (const std::string& failure : failures) EXPECT_THAT(failure, HasSubstr("the test throws"));
}

}  // namespace
}  // namespace cadre
