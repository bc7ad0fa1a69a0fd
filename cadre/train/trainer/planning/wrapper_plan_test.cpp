// Compares plans with the wrappers that they describe: the allocated memory and its peak on each
// rank, and the operations of a step.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/core/collective/op.h"
#include "cadre/core/comm/symmetric/symmetric_heap.h"
#include "cadre/parallel/plan/memory_plan.h"
#include "cadre/parallel/shard/step_agreement.h"
#include "cadre/testing/torch/measured_memory.h"
#include "cadre/testing/torch/plan_wrappers.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::CountedMemory;
using testing::run_groups;

constexpr int kNumSteps = 3;
// An upper bound for the activations of two samples and the temporary memory of an operation.
constexpr int64_t kFewBytes = 64 * 1024;

size_t num_in_record(const ProcessGroup& group) {
  return group.communicator().flight_record().entries.size();
}

void add_call(OperationTraffic& sum, int64_t num_bytes) {
  ++sum.num_calls;
  sum.payload_bytes += num_bytes;
}

// Adds the group's operations from number `first` on to `traffic`, with their bytes counted as in a
// plan.
void add_recorded(StepTraffic& traffic, const ProcessGroup& group, size_t first) {
  const FlightRecord record = group.communicator().flight_record();
  for (size_t i = first; i < record.entries.size(); ++i) {
    const auto op = OpDescriptor::from_fingerprint(record.entries[i].fingerprint);
    const auto num_bytes = static_cast<int64_t>(op.count * size_of(op.dtype));
    if (op.kind == OpKind::kAllReduce) add_call(traffic.all_reduce, num_bytes);
    if (op.kind == OpKind::kAllGather) add_call(traffic.all_gather, num_bytes * group.world_size());
    if (op.kind == OpKind::kReduceScatter) {
      add_call(traffic.reduce_scatter, num_bytes * group.world_size());
    }
  }
}

// Returns how many bytes of the shared memory of the groups this rank has allocated.
int64_t allocated_bytes(const std::vector<ProcessGroup>& groups) {
  size_t held = 0;
  for (const ProcessGroup& group : groups) {
    for (const FlightEntry& entry : group.communicator().flight_record().entries) {
      const auto op = OpDescriptor::from_fingerprint(entry.fingerprint);
      if (op.kind != OpKind::kAllocate) continue;
      held += SymmetricHeap::held_bytes(op.count, group.world_size());
    }
  }
  return static_cast<int64_t>(held);
}

void expect_calls(const OperationTraffic& recorded, const OperationTraffic& planned,
                  const char* what) {
  EXPECT_EQ(recorded.num_calls, planned.num_calls) << what;
  EXPECT_EQ(recorded.payload_bytes, planned.payload_bytes) << what;
}

// Trains the wrapped model and compares it with the plan. `bytes_before` is the memory that the
// rank held before the model was made.
template <typename Model, typename Optimizer>
void expect_plan(Model& model, Optimizer& optimizer, const std::vector<ProcessGroup>& groups,
                 const MemoryPlan& plan, int64_t bytes_before) {
  const PlanOptions& options = plan.options;
  CountedMemory& memory = CountedMemory::install();
  const torch::Tensor x = torch::randn({2, testing::kPlannedWidth});
  // Mapped shards have a page of version counters on each rank, which a plan does not count.
  const size_t num_pages = plan.is_mapped ? 1 : 0;
  EXPECT_EQ(allocated_bytes(groups),
            plan.shared_bytes + num_pages * SymmetricHeap::held_bytes(1, options.num_ranks));
  StepTraffic traffic;  // the traffic of the last step
  memory.reset_peak(options.rank);
  for (int step = 0; step < kNumSteps; ++step) {
    std::vector<size_t> first;
    for (const ProcessGroup& group : groups) first.push_back(num_in_record(group));
    testing::accumulate_gradients(model, optimizer, x, options.accumulate);
    optimizer.step();
    if (step + 1 < kNumSteps) continue;
    for (size_t i = 0; i < groups.size(); ++i) add_recorded(traffic, groups[i], first[i]);
  }
  const int64_t peak = memory.peak_bytes(options.rank) - bytes_before;
  const int64_t expected = plan.held.total() - plan.shared_bytes;
  EXPECT_LE(peak, expected + kFewBytes) << "rank " << options.rank;
  EXPECT_GE(peak, expected - kFewBytes) << "rank " << options.rank;
  if constexpr (requires { model.peak_full_bytes(); }) {
    EXPECT_EQ(model.peak_full_bytes(), plan.held.full_units);
  }
  // A group of one rank moves no data, so there is nothing to compare.
  if (options.num_ranks == 1) return;
  // The plan describes the optimizer of the trainer. The ShardedOptimizer of this test additionally
  // compares its options among the ranks before each step.
  StepTraffic planned = plan.traffic;
  if (has_units(options.strategy)) add_call(planned.all_reduce, shard::kStepMessageBytes);
  expect_calls(traffic.all_reduce, planned.all_reduce, "all_reduce");
  expect_calls(traffic.all_gather, planned.all_gather, "all_gather");
  expect_calls(traffic.reduce_scatter, planned.reduce_scatter, "reduce_scatter");
}

struct PlanCase {
  const char* name;
  int num_ranks;
  PlanOptions options;
  // The parameters whose names begin with one of these prefixes are frozen.
  std::vector<std::string> frozen = {};
};

class PlanOfWrapper : public ::testing::TestWithParam<PlanCase> {};

template <typename Net>
void compare_with_plan(const PlanCase& planned) {
  CountedMemory& memory = CountedMemory::install();
  const auto result = run_groups(planned.num_ranks, [&](const ProcessGroup& world) {
    CountedMemory::set_rank(world.rank());
    PlanOptions options = planned.options;
    options.num_ranks = options.ranks_per_host = planned.num_ranks;
    options.rank = world.rank();
    testing::cap_buckets(options);
    const int64_t before = memory.bytes(world.rank());
    const auto net = std::make_shared<Net>();
    for (const auto& parameter : net->named_parameters()) {
      for (const std::string& name : planned.frozen) {
        if (parameter.key().starts_with(name)) parameter.value().requires_grad_(false);
      }
    }
    const MemoryPlan plan = plan_memory(model_sizes_of(net, testing::planned_units()), options);
    testing::with_planned_wrappers(
        net, testing::planned_units(), world, options,
        [&](auto& model, auto& optimizer, const std::vector<ProcessGroup>& groups) {
          expect_plan(model, optimizer, groups, plan, before);
        });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_P(PlanOfWrapper, IsWhatEachRankAllocatesAndMoves) {
  compare_with_plan<testing::PlannedNet>(GetParam());
  if (has_units(GetParam().options.strategy)) {
    compare_with_plan<testing::PlannedNetOfShardUnits>(GetParam());
  }
}

constexpr auto kPlanFsdp = DataStrategy::kFsdp;
INSTANTIATE_TEST_SUITE_P(
    Cases, PlanOfWrapper,
    ::testing::Values(
        PlanCase{"ddp", 2, {.strategy = DataStrategy::kDdp}},
        PlanCase{"ddp_accumulating", 3, {.strategy = DataStrategy::kDdp, .accumulate = 2}},
        PlanCase{"zero1", 3, {.strategy = DataStrategy::kZero1}},
        PlanCase{"zero2", 3, {.strategy = DataStrategy::kZero2}},
        PlanCase{"zero2_accumulating", 2, {.strategy = DataStrategy::kZero2, .accumulate = 3}},
        PlanCase{"fsdp", 3, {.strategy = kPlanFsdp}},
        PlanCase{"fsdp_alone", 1, {.strategy = kPlanFsdp}},
        PlanCase{"fsdp_without_prefetch", 2, {.strategy = kPlanFsdp, .num_prefetched = 0}},
        PlanCase{"fsdp_accumulating", 2, {.strategy = kPlanFsdp, .accumulate = 3}},
        PlanCase{"fsdp_kept", 2, {.strategy = kPlanFsdp, .reshard = Reshard::kAfterBackward}},
        PlanCase{"fsdp_kept_over_backwards",
                 3,
                 {.strategy = kPlanFsdp,
                  .accumulate = 2,
                  .reshard = Reshard::kAfterReduction,
                  .reshard_root = Reshard::kAfterReduction}},
        PlanCase{
            "fsdp_float64_reduction", 2, {.strategy = kPlanFsdp, .reduce_dtype = DType::kFloat64}},
        PlanCase{"fsdp_bfloat16",
                 2,
                 {.strategy = kPlanFsdp,
                  .parameter_dtype = DType::kBfloat16,
                  .reduce_dtype = DType::kFloat32}},
        // Because of the frozen layers, the output of the first layer requires no gradient, but
        // that of the fourth layer does.
        PlanCase{"fsdp_frozen", 2, {.strategy = kPlanFsdp}, {"last", "layer0", "layer3"}},
        PlanCase{"fsdp_mapped", 3, {.strategy = kPlanFsdp, .is_mapped = true}},
        PlanCase{"hsdp", 4, {.strategy = DataStrategy::kHsdp, .num_replicas = 2}}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(PlanOptions, HaveTheDefaultsOfTheClasses) {
  EXPECT_EQ(PlanOptions{}.zero_bucket_cap_bytes, ZeroOptions{}.bucket_cap_bytes);
  EXPECT_EQ(PlanOptions{}.reshard, FullyShardedDataParallelOptions{}.reshard);
  EXPECT_EQ(PlanOptions{}.reshard_root, FullyShardedDataParallelOptions{}.reshard_root);
  EXPECT_EQ(PlanOptions{}.num_prefetched, FullyShardedDataParallelOptions{}.num_prefetched);
}

}  // namespace
}  // namespace cadre
