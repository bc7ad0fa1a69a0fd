#include "division_checks.h"

#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <vector>

#include "cadre/core/schedule/generate.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/parallel/plan/memory_plan.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/plan_wrappers.h"
#include "cadre/testing/torch/pp_model.h"
#include "cadre/testing/torch/tp_models.h"
#include "tests/devices/divided_training.h"
#include "tests/devices/training_on_devices.h"

namespace cadre::device_check {
namespace {

using torch::Tensor;

// Compares the largest difference on any rank with `bound`.
Finding finding_of(double difference, double bound, const ProcessGroup& world) {
  Finding finding;
  const Tensor of_all = torch::tensor(difference, torch::kDouble);
  world.all_reduce(of_all, {.op = ReduceOp::kMax});
  // Not a number is no small difference.
  finding.expect(of_all.item<double>() <= bound,
                 cadre::format("largest difference {:.1e}", of_all.item<double>()));
  return finding;
}

double largest_difference(const std::vector<Tensor>& found, const std::vector<Tensor>& expected) {
  double largest = found.size() == expected.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(found.size(), expected.size()); ++i) {
    largest = std::max(largest, (found[i].cpu() - expected[i]).abs().max().item<double>());
  }
  return largest;
}

}  // namespace

// The parameters after four steps on uneven shares of the rows.
Finding check_fsdp(const Check& check, const ProcessGroup& world) {
  const testing::TrainingProgram program{"plain"};
  FullyShardedDataParallel<testing::UnitNet> model(testing::net_on(check.device), world,
                                                   {.wrap_policy = wrap_shard_units()});
  ShardedOptimizer<AdamW> optimizer(model, testing::adamw());
  testing::train_on_rows(program, model, optimizer, world, check.device);
  return finding_of(
      testing::largest_difference(testing::whole_values_of(model), testing::trained_alone(program)),
      1e-4, world);
}

// The losses of three steps of a language model.
Finding check_tensor_parallel(const Check& check, const ProcessGroup& world) {
  const testing::Case of{"gpt_tied_sequence", "sgd", 2, torch::kDouble};
  const auto train = [](testing::DividedModel& model, const std::vector<Tensor>& batches) {
    return testing::train_divided(testing::parameters_of(model), batches, [&](const Tensor& batch) {
      ++model.stream->step;
      return model.loss(model.forward(batch), batch);
    });
  };
  const auto plain = testing::make_divided_model(of, 1);
  std::vector<Tensor> batches;
  for (int i = 0; i < 3; ++i) batches.push_back(plain->make_batch(of.batch));
  const auto alone = train(*plain, batches);
  const auto model = testing::make_divided_model(of, 1);
  model->to(check.device);
  parallelize_module(*model, world, model->plan());
  model->group = world;
  const auto divided = train(*model, testing::moved_to(batches, check.device));
  return finding_of(largest_difference(divided.losses, alone.losses), 1e-4, world);
}

// The losses of three steps, with a stage on each process.
Finding check_pipeline(const Check& check, const ProcessGroup& world) {
  constexpr int64_t kRows = 8;
  const int size = world.world_size();
  const auto sgd = torch::optim::SGDOptions(0.05).momentum(0.9);
  const auto trained_of = [](torch::nn::Module& module, std::vector<Tensor>& trained) {
    for (const Tensor& parameter : module.parameters()) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
  };
  const auto whole = testing::all_stages(size);
  std::vector<Tensor> of_whole;
  for (const auto& stage : whole) trained_of(*stage, of_whole);
  torch::optim::SGD steps_alone(of_whole, sgd);
  const auto own = std::make_shared<testing::StageNet>(world.rank(), size);
  own->to(check.device);
  Pipeline pipeline({{own, {.stage = world.rank(), .num_stages = size}}}, world,
                    {.num_microbatches = 4});
  std::vector<Tensor> of_own;
  trained_of(*own, of_own);
  torch::optim::SGD steps(of_own, sgd);
  std::vector<Tensor> found;
  std::vector<Tensor> expected;
  for (int step = 0; step < 3; ++step) {
    const Tensor tokens = testing::tokens_of(kRows, step);
    steps_alone.zero_grad();
    const Tensor loss =
        testing::cross_entropy(testing::forward_all(whole, tokens), testing::targets_of(tokens));
    loss.backward();
    steps_alone.step();
    expected.push_back(loss.detach());
    steps.zero_grad();
    const Tensor on_device = tokens.to(check.device);
    found.push_back(pipeline
                        .step(on_device, testing::targets_of(on_device), testing::cross_entropy,
                              {.broadcast_losses = true})
                        .loss);
    steps.step();
  }
  return finding_of(largest_difference(found, expected), 1e-4, world);
}

Finding check_memory_plan(const Check& check, const ProcessGroup& world) {
  constexpr double kLargestError = 0.05;
  constexpr int kNumSteps = 3;
  Finding finding;
  for (const DataStrategy strategy : {DataStrategy::kDdp, DataStrategy::kFsdp}) {
    PlanOptions options{.strategy = strategy,
                        .num_ranks = world.world_size(),
                        .ranks_per_host = world.world_size(),
                        .rank = world.rank(),
                        .is_on_device = true};
    testing::cap_buckets(options);
    const size_t before = check.runtime.memory(check.device).allocated_bytes;
    const auto net = std::make_shared<testing::PlannedNet>();
    net->to(check.device);
    const MemoryPlan plan = plan_memory(model_sizes_of(net, testing::planned_units()), options);
    const Tensor x = torch::randn({2, testing::kPlannedWidth}).to(check.device);
    testing::with_planned_wrappers(
        net, testing::planned_units(), world, options,
        [&](auto& model, auto& optimizer, const auto& /*groups*/) {
          for (int step = 0; step < kNumSteps; ++step) {
            if (step + 1 == kNumSteps) check.runtime.reset_peaks(check.device);
            testing::accumulate_gradients(model, optimizer, x, options.accumulate);
            optimizer.step();
          }
          const auto used =
              static_cast<double>(check.runtime.memory(check.device).peak_allocated_bytes - before);
          const double error = used / static_cast<double>(plan.held.total()) - 1;
          finding.expect(std::abs(error) < kLargestError,
                         cadre::format("{}: {:.2f} MB, {:+.2f} % of the plan", to_string(strategy),
                                       used / 1e6, 100 * error));
        });
  }
  return finding;
}

}  // namespace cadre::device_check
