// Plans against the wrappers: the allocations and the peak of each rank, and the operations of a
// step.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/op.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/parallel/plan/memory_plan.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/torch/plan_test_memory.h"
#include "cadre/testing/torch/process_group_test_ranks.h"

namespace cadre {
namespace {

using testing::CountedMemory;
using testing::run_groups;

// Odd sizes, so that shards are padded; the root holds a vector that is added last of all.
constexpr int64_t kInner = 301;
constexpr int kNumLayers = 6;
constexpr int kNumSteps = 3;
constexpr int64_t kFewBytes = 64 * 1024;  // activations of two samples, and what an operation needs

struct WideImpl : torch::nn::Module {
  WideImpl()
      : expand(register_module("expand", torch::nn::Linear(kInner, kInner))),
        shrink(register_module("shrink", torch::nn::Linear(kInner, kInner))) {}
  torch::Tensor forward(const torch::Tensor& x) { return shrink(torch::relu(expand(x))); }
  torch::nn::Linear expand, shrink;
};
using WideUnit = torch::nn::ModuleHolder<ShardUnit<WideImpl>>;

struct Stack : torch::nn::Module {
  Stack() {
    for (int i = 0; i < kNumLayers; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), WideUnit()));
    }
    last = register_parameter("last", torch::zeros({kInner}));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = layer->forward(x);
    return x + last;
  }
  std::vector<WideUnit> layers;
  torch::Tensor last;
};

ModelSizes sizes_of_stack(const Stack& net, const PlanOptions& options) {
  ModelSizes model;
  for (int i = 0; i < kNumLayers; ++i) model.units.push_back({.name = format("layer{}", i)});
  for (const auto& item : net.named_parameters()) {
    const bool is_root = !has_units(options.strategy) || item.key() == "last";
    model.parameters.push_back(
        {.name = item.key(),
         .sizes = item.value().sizes().vec(),
         .unit = is_root ? 0 : 1 + static_cast<size_t>(item.key()[5] - '0')});
  }
  return model;
}

size_t num_in_record(const ProcessGroup& group) {
  return group.communicator().flight_record().entries.size();
}

void add_call(OperationTraffic& sum, int64_t num_bytes) {
  ++sum.num_calls;
  sum.payload_bytes += num_bytes;
}

// The operations of the group from number `first` on, as a plan counts them.
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

void expect_calls(const OperationTraffic& recorded, const OperationTraffic& planned,
                  const char* what) {
  EXPECT_EQ(recorded.num_calls, planned.num_calls) << what;
  EXPECT_EQ(recorded.payload_bytes, planned.payload_bytes) << what;
}

struct Trial {
  const PlanOptions& options;
  const MemoryPlan& plan;
  int64_t bytes_before = 0;  // the model was made
};

// `groups`: in which the operations are.
template <typename Model, typename Optimizer>
void expect_plan(Model& model, Optimizer& optimizer, const Trial& trial,
                 const std::vector<ProcessGroup>& groups) {
  CountedMemory& memory = CountedMemory::install();
  const int rank = trial.options.rank;
  const torch::Tensor x = torch::randn({2, kInner});
  StepTraffic traffic;  // traffic of the last step
  memory.reset_peak(rank);
  for (int step = 0; step < kNumSteps; ++step) {
    std::vector<size_t> first;
    for (const ProcessGroup& group : groups) first.push_back(num_in_record(group));
    optimizer.zero_grad();
    for (int64_t part = 1; part < trial.options.accumulate; ++part) {
      const auto guard = model.no_sync();
      model(x).pow(2).mean().backward();
    }
    model(x).pow(2).mean().backward();
    optimizer.step();
    if (step + 1 < kNumSteps) continue;
    for (size_t i = 0; i < groups.size(); ++i) add_recorded(traffic, groups[i], first[i]);
  }
  const int64_t peak = memory.peak_bytes(rank) - trial.bytes_before;
  const int64_t expected = trial.plan.held.total() - trial.plan.shared_bytes;
  EXPECT_LE(peak, expected + kFewBytes) << "rank " << rank;
  EXPECT_GE(peak, expected - kFewBytes) << "rank " << rank;
  if (trial.options.num_ranks == 1)
    return;  // a group of one moves nothing, whatever it is asked for
  expect_calls(traffic.all_reduce, trial.plan.traffic.all_reduce, "all_reduce");
  expect_calls(traffic.all_gather, trial.plan.traffic.all_gather, "all_gather");
  expect_calls(traffic.reduce_scatter, trial.plan.traffic.reduce_scatter, "reduce_scatter");
}

FullyShardedDataParallelOptions sharding_of(const PlanOptions& options) {
  FullyShardedDataParallelOptions sharding{
      .form = options.is_mapped ? ShardForm::kMapped : ShardForm::kGathered,
      .reshard = options.reshard,
      .reshard_root = options.reshard_root,
      .num_prefetched = options.num_prefetched};
  if (options.parameter_dtype) {
    sharding.precision.parameters = to_scalar_type(*options.parameter_dtype);
  }
  if (options.reduce_dtype) sharding.precision.reduce = to_scalar_type(*options.reduce_dtype);
  sharding.wrap_policy = wrap_by_size(1);
  return sharding;
}

void try_units(const std::shared_ptr<Stack>& net, const ProcessGroup& world, const Trial& trial) {
  const PlanOptions& options = trial.options;
  const torch::optim::AdamWOptions adamw(1e-3);
  if (options.strategy == DataStrategy::kHsdp) {
    const DeviceMesh mesh(world, {{"replicate", options.num_replicas},
                                  {"shard", options.num_ranks / options.num_replicas}});
    FullyShardedDataParallel model{net, mesh, sharding_of(options)};
    AdamW optimizer{model.parameters(), adamw};
    expect_plan(
        model, optimizer, trial,
        {mesh.joint_group({"replicate", "shard"}), mesh.group("replicate"), mesh.group("shard")});
    return;
  }
  FullyShardedDataParallel model{net, world, sharding_of(options)};
  ShardedOptimizer<AdamW> optimizer{model, adamw};
  // A plan is one of the trainer, whose optimizer does not compare options before each step, as a
  // ShardedOptimizer does: the bounds of two digests and a refusal.
  MemoryPlan plan = trial.plan;
  add_call(plan.traffic.all_reduce, /*num_bytes=*/40);
  const Trial compared = {.options = options, .plan = plan, .bytes_before = trial.bytes_before};
  expect_plan(model, optimizer, compared, {world});
  EXPECT_EQ(model.peak_full_bytes(), trial.plan.held.full_units);
}

void try_whole(const std::shared_ptr<Stack>& net, const ProcessGroup& world, const Trial& trial) {
  const PlanOptions& options = trial.options;
  const torch::optim::AdamWOptions adamw(1e-3);
  const auto placement = options.strategy == DataStrategy::kZero2 ? GradientPlacement::kSharded
                                                                  : GradientPlacement::kReplicated;
  DistributedDataParallel model{
      net, world, {.bucket_caps = options.bucket_caps, .gradients = placement}};
  if (options.strategy == DataStrategy::kDdp) {
    AdamW optimizer{net->parameters(), adamw};
    expect_plan(model, optimizer, trial, {world});
    return;
  }
  ZeroRedundancyOptimizer<AdamW> optimizer{
      model, adamw, {.bucket_cap_bytes = options.zero_bucket_cap_bytes, .wait_in_step = true}};
  expect_plan(model, optimizer, trial, {world});
}

struct PlanCase {
  const char* name;
  int num_ranks;
  PlanOptions options;
};

class PlanOfWrapper : public ::testing::TestWithParam<PlanCase> {};

TEST_P(PlanOfWrapper, IsWhatEachRankAllocatesAndMoves) {
  CountedMemory& memory = CountedMemory::install();
  const auto result = run_groups(GetParam().num_ranks, [&](const ProcessGroup& world) {
    CountedMemory::set_rank(world.rank());
    PlanOptions options = GetParam().options;
    options.num_ranks = options.ranks_per_host = GetParam().num_ranks;
    options.rank = world.rank();
    // Several buckets and buffers.
    options.bucket_caps = {.first_bytes = 100'000, .bytes = 700'000};
    options.zero_bucket_cap_bytes = 900'000;
    const int64_t before = memory.bytes(world.rank());
    const auto net = std::make_shared<Stack>();
    const MemoryPlan plan = plan_memory(sizes_of_stack(*net, options), options);
    const Trial trial{.options = options, .plan = plan, .bytes_before = before};
    if (has_units(options.strategy)) {
      try_units(net, world, trial);
    } else {
      try_whole(net, world, trial);
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
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
        PlanCase{"fsdp_mapped", 3, {.strategy = kPlanFsdp, .is_mapped = true}},
        PlanCase{"hsdp", 4, {.strategy = DataStrategy::kHsdp, .num_replicas = 2}}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(PlanOptions, HaveTheDefaultsOfTheClasses) {
  EXPECT_EQ(PlanOptions{}.zero_bucket_cap_bytes, ZeroOptions{}.bucket_cap_bytes);
  EXPECT_EQ(PlanOptions{}.alignment, FlatParametersOptions{}.alignment);
  EXPECT_EQ(PlanOptions{}.reshard, FullyShardedDataParallelOptions{}.reshard);
  EXPECT_EQ(PlanOptions{}.reshard_root, FullyShardedDataParallelOptions{}.reshard_root);
  EXPECT_EQ(PlanOptions{}.num_prefetched, FullyShardedDataParallelOptions{}.num_prefetched);
}

}  // namespace
}  // namespace cadre
