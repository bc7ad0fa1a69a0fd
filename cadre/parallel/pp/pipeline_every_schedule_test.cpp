// Tests every schedule on 2 to 8 ranks with 1 to 16 microbatches and 1 to 4 stages on each rank.
// First the checker of schedules must accept the schedule. Then it runs, with threads as ranks:
// each rank must compute in the order that the simulator of schedules predicts and keep activations
// of the predicted number of microbatches, and the losses, outputs and gradients of two steps must
// be those of one process. The bound in float64 is 1e-10 of the largest value of each tensor,
// because the sums over microbatches are added in another order than sums over rows.
// CADRE_CASES_SEED selects the cases that CTest runs.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/schedule/check.h"
#include "cadre/core/schedule/generate.h"
#include "cadre/core/schedule/simulate.h"
#include "cadre/parallel/pp/pipeline.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using torch::Tensor;

constexpr int kRowsPerMicrobatch = 2;
constexpr int kFeatures = 3;

// Returns values in (-1/2, 1/2), which depend on `offset`.
Tensor values_of(const std::vector<int64_t>& sizes, double offset) {
  const Tensor values = torch::empty(sizes, torch::kDouble);
  return values.copy_((torch::arange(values.numel(), torch::kDouble) + offset).sin().view(sizes) /
                      2);
}

// A stage that computes x + tanh(x weight). Its second input has the indices of the rows in the
// batch, from which the stage knows to which microbatch x belongs.
struct TracedStage {
  explicit TracedStage(int number)
      : stage(number),
        weight(values_of({kFeatures, kFeatures}, 10.0 * number + 1).requires_grad_()) {}

  Tensor forward(const Tensor& x) const { return x + torch::tanh(torch::matmul(x, weight)); }

  // Appends an entry to `trace` when a computation runs, for example "2F0" for the forward of stage
  // 2 on microbatch 0, and "2I0" and "2W0" for its input and weight gradients.
  std::vector<Tensor> traced(const std::vector<Tensor>& inputs,
                             std::vector<std::string>& trace) const {
    const int64_t microbatch = inputs[1][0].item<int64_t>() / kRowsPerMicrobatch;
    const auto add = [&trace, number = stage, microbatch](char kind) {
      trace.push_back(format("{}{}{}", number, kind, microbatch));
    };
    add('F');
    const Tensor used = weight.view_as(weight);
    used.register_hook([add](const Tensor&) { add('W'); });
    // This view is made after `used`. Autograd runs the backward of later operations first, so "I"
    // is appended before "W".
    const Tensor x = inputs[0].view_as(inputs[0]);
    if (x.requires_grad()) x.register_hook([add](const Tensor&) { add('I'); });
    return {x + torch::tanh(torch::matmul(x, used)), inputs[1]};
  }

  int stage;
  Tensor weight;
};

// Returns the entries that TracedStage appends if a rank computes in the order of the simulator.
// Stage 0 has no "I" entries, because the batch requires no gradient.
std::vector<std::string> expected_trace(const std::vector<TimedAction>& actions) {
  std::vector<std::string> trace;
  for (const TimedAction& timed : actions) {
    for (const PipelineAction& leaf : leaves_of(timed.action)) {
      const auto add = [&](char kind) {
        trace.push_back(format("{}{}{}", leaf.stage, kind, *leaf.microbatch));
      };
      const bool is_whole = leaf.kind == PipelineActionKind::kBackward;
      if (leaf.kind == PipelineActionKind::kForward) add('F');
      if ((is_whole || leaf.kind == PipelineActionKind::kInputGrad) && leaf.stage > 0) add('I');
      if (is_whole || leaf.kind == PipelineActionKind::kWeightGrad) add('W');
    }
  }
  return trace;
}

double relative_difference(const Tensor& given, const Tensor& expected) {
  const torch::NoGradGuard no_grad;
  return ((given - expected).abs().max() / expected.abs().max()).item<double>();
}

struct Batch {
  Batch(int num_microbatches, int step) {
    const int64_t num_rows = int64_t{kRowsPerMicrobatch} * num_microbatches;
    x = values_of({num_rows, kFeatures}, 1000 + 100.0 * step);
    target = values_of({num_rows, kFeatures}, 5000 + 100.0 * step);
    rows = torch::arange(num_rows);
  }
  Tensor x, target, rows;
};

constexpr int kSteps = 2;  // the first step sends headers, the second does not

struct OneProcess {
  std::vector<Tensor> losses, outputs;  // one entry for each step
  std::vector<Tensor> gradients;        // sums over all steps, for each stage
};

OneProcess compute_in_one_process(const PipelineSchedule& schedule) {
  std::vector<TracedStage> stages;
  for (int stage = 0; stage < schedule.num_stages(); ++stage) stages.emplace_back(stage);
  OneProcess result;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch(schedule.num_microbatches, step);
    Tensor x = batch.x;
    for (const TracedStage& stage : stages) x = stage.forward(x);
    const Tensor loss = torch::mse_loss(x, batch.target);
    loss.backward();
    result.losses.push_back(loss.detach());
    result.outputs.push_back(x.detach());
  }
  for (const TracedStage& stage : stages) result.gradients.push_back(stage.weight.grad());
  return result;
}

void compute_in_pipeline(const PipelineSchedule& schedule, const ProcessGroup& group,
                         const OneProcess& alone) {
  std::vector<std::string> trace;
  std::vector<TracedStage> held;
  std::vector<PipelineStage> stages;
  for (int number = 0; number < schedule.num_stages(); ++number) {
    if (schedule.rank_of_stage[static_cast<size_t>(number)] != group.rank()) continue;
    const TracedStage& stage = held.emplace_back(number);
    stages.emplace_back(
        [stage, &trace](const std::vector<Tensor>& inputs) { return stage.traced(inputs, trace); },
        std::vector<NamedTensor>{{"weight", stage.weight}},
        PipelineStageOptions{.stage = number, .num_stages = schedule.num_stages()});
  }
  Pipeline pipeline(stages, group, {.schedule = schedule});
  const Status checked = check_pipeline(pipeline.schedule());
  EXPECT_TRUE(checked.ok()) << checked.error().message();
  const PipelineTimeline timeline = simulate_pipeline(pipeline.schedule(), {}).value_or_throw();
  const auto rank = static_cast<size_t>(group.rank());
  for (size_t step = 0; step < kSteps; ++step) {
    trace.clear();
    const Batch batch(schedule.num_microbatches, static_cast<int>(step));
    const PipelineResult result =
        pipeline.step(std::vector<Tensor>{batch.x, batch.rows}, batch.target,
                      [](const std::vector<Tensor>& outputs, const std::vector<Tensor>& targets) {
                        return torch::mse_loss(outputs[0], targets[0]);
                      },
                      {.broadcast_losses = true, .return_outputs = true});
    EXPECT_EQ(trace, expected_trace(timeline.ranks[rank])) << "rank " << rank;
    EXPECT_EQ(result.peak_live_microbatches, timeline.peak_live_activations[rank]);
    EXPECT_LE(relative_difference(result.loss, alone.losses[step]), 1e-10);
    if (result.outputs.empty()) continue;
    EXPECT_LE(relative_difference(result.outputs[0], alone.outputs[step]), 1e-10);
  }
  for (const TracedStage& stage : held) {
    ASSERT_TRUE(stage.weight.grad().defined()) << "stage " << stage.stage;
    const Tensor& expected = alone.gradients[static_cast<size_t>(stage.stage)];
    EXPECT_LE(relative_difference(stage.weight.grad(), expected), 1e-10) << "stage " << stage.stage;
  }
}

std::string name_of(const PipelineScheduleOptions& options) {
  std::string name(info_of(options.kind).name);
  std::ranges::replace(name, '-', '_');
  return format("{}_r{}_m{}_v{}", name, options.num_ranks, options.num_microbatches,
                *options.stages_per_rank);
}

// Selects schedules at random. Every n-th schedule of a regular enumeration would miss properties
// whose period divides n.
std::vector<PipelineScheduleOptions> picked_schedules() {
  std::vector<PipelineScheduleOptions> all;
  for (const PipelineScheduleInfo& info : pipeline_schedules()) {
    for (int num_ranks = 2; num_ranks <= 8; ++num_ranks) {
      for (int num_microbatches = 1; num_microbatches <= 16; ++num_microbatches) {
        for (int count = info.min_stages_per_rank; count <= std::min(4, info.max_stages_per_rank);
             ++count) {
          all.push_back({info.kind, num_ranks, num_microbatches, count});
        }
      }
    }
  }
  std::ranges::shuffle(all, std::mt19937_64(testing::cases_seed()));
  auto picked = testing::share_of(testing::share_of(all));
  std::erase_if(picked, [](const PipelineScheduleOptions& options) {
    return !make_pipeline_schedule(options).ok();
  });
  return picked;
}

class PipelineScheduleEquality : public ::testing::TestWithParam<PipelineScheduleOptions> {};

TEST_P(PipelineScheduleEquality, CheckerSimulatorAndRunAgree) {
  at::set_num_threads(1);  // each rank has one thread
  const PipelineSchedule schedule = make_pipeline_schedule(GetParam()).value_or_throw();
  const Status checked = check_pipeline(schedule);
  ASSERT_TRUE(checked.ok()) << checked.error().message();
  const OneProcess alone = compute_in_one_process(schedule);
  const auto result = testing::run_groups(schedule.num_ranks(), [&](const ProcessGroup& group) {
    compute_in_pipeline(schedule, group, alone);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

INSTANTIATE_TEST_SUITE_P(Schedules, PipelineScheduleEquality,
                         ::testing::ValuesIn(picked_schedules()),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace cadre
