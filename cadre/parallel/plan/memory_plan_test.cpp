// Compares memory plans with numbers that were computed by hand, and tests invalid options.
#include "cadre/parallel/plan/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cadre/core/base/error.h"
#include "cadre/parallel/plan/unit_residency.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPage = 4096;
constexpr int64_t kTrailer = 167 * 4;
constexpr int64_t kSamples = 128;  // bytes of the all_reduce of the ranks' sample counts
constexpr int64_t kDigests = 40;   // kStepMessageBytes of step_agreement.h

// A model of two layers, each of which is a unit with a weight of 64 x 64 and a bias of 64
// elements, and of a head of 64 elements in the root. It has 8,384 elements or 33,536 bytes.
ModelSizes small_model() {
  return {.parameters = {{.name = "a.weight", .sizes = {64, 64}, .unit = 1},
                         {.name = "a.bias", .sizes = {64}, .unit = 1},
                         {.name = "b.weight", .sizes = {64, 64}, .unit = 2},
                         {.name = "b.bias", .sizes = {64}, .unit = 2},
                         {.name = "head", .sizes = {64}}},
          .units = {{.name = ""}, {.name = "a"}, {.name = "b"}}};
}

constexpr int64_t kLayer = 4 * (64 * 64 + 64);  // 16,640 bytes
constexpr int64_t kHead = 4 * 64;
constexpr int64_t kAll = 2 * kLayer + kHead;

PlanOptions on_ranks(DataStrategy strategy, int num_ranks) {
  return {.strategy = strategy, .num_ranks = num_ranks, .ranks_per_host = num_ranks};
}

TEST(MemoryPlan, OfOneRankIsFourTimesTheParameters) {
  const MemoryPlan plan = plan_memory(small_model(), on_ranks(DataStrategy::kSingle, 1));
  EXPECT_EQ(plan.held.parameters, kAll);
  EXPECT_EQ(plan.held.gradients, kAll);
  EXPECT_EQ(plan.held.optimizer_state, 2 * kAll);
  EXPECT_EQ(plan.held.total(), 4 * kAll);
  EXPECT_EQ(plan.traffic.received_bytes(), 0);
}

// The first bucket has a cap of 1 MiB, so it contains all gradients and the trailer: 34,204 bytes,
// which take 9 pages. One more page is for the signal pad of symmetric memory.
TEST(MemoryPlan, OfDdpHasBucketsAndTwiceTheGradientsMoved) {
  const MemoryPlan plan = plan_memory(small_model(), on_ranks(DataStrategy::kDdp, 2));
  EXPECT_EQ(plan.held.parameters, kAll);
  EXPECT_EQ(plan.held.gradients, 10 * kPage);
  EXPECT_EQ(plan.held.optimizer_state, 2 * kAll);
  EXPECT_EQ(plan.held.transient, 4 * 64 * 64) << "the largest gradient";
  EXPECT_EQ(plan.shared_bytes, 10 * kPage);
  EXPECT_EQ(plan.traffic.all_reduce.num_calls, 2);
  EXPECT_EQ(plan.traffic.all_reduce.payload_bytes, kAll + kTrailer + kSamples);
  // Each of N ranks receives 2 (N - 1) / N of the payload: all of it for N = 2, 6/4 for N = 4.
  EXPECT_EQ(plan.traffic.received_bytes(), kAll + kTrailer + kSamples);
  EXPECT_EQ(plan_memory(small_model(), on_ranks(DataStrategy::kDdp, 4)).traffic.received_bytes(),
            6 * ((kAll + kTrailer + kSamples) / 4));
}

// Nothing is shared or rounded up to pages, and the trailer of sharded gradients is on the host.
TEST(MemoryPlan, OfADeviceCountsTensorsOfTheDevice) {
  PlanOptions ddp = on_ranks(DataStrategy::kDdp, 2);
  ddp.is_on_device = true;
  const MemoryPlan replicas = plan_memory(small_model(), ddp);
  EXPECT_EQ(replicas.held.gradients, kAll + kTrailer);
  EXPECT_EQ(replicas.shared_bytes, 0);
  EXPECT_EQ(replicas.host_bytes, 2 * replicas.held.total());
  PlanOptions fsdp = on_ranks(DataStrategy::kFsdp, 3);
  fsdp.is_on_device = true;
  const MemoryPlan shards = plan_memory(small_model(), fsdp);
  constexpr int64_t kUnit = 3 * 1408 * 4;
  EXPECT_EQ(shards.held.parameters, 4 * (32 + 2 * 1408));
  EXPECT_EQ(shards.held.reduction_buffers, 2 * kUnit);
  EXPECT_EQ(shards.shared_bytes, 0);
  EXPECT_EQ(shards.traffic.received_bytes(),
            plan_memory(small_model(), on_ranks(DataStrategy::kFsdp, 3)).traffic.received_bytes());
}

TEST(MemoryPlan, OfStage1DividesTheStateAndGathers) {
  PlanOptions options = on_ranks(DataStrategy::kZero1, 4);
  // One buffer for layer a, and one for layer b and the head.
  options.zero_bucket_cap_bytes = 20'000;
  const MemoryPlan plan = plan_memory(small_model(), options);
  // The 4,160 elements of layer a give shards of 1,040 elements, padded to 1,056. The 4,224
  // elements of layer b and the head give shards of 1,056. So each buffer has 4 * 1,056 elements,
  // 16,896 bytes, which take 5 pages, and one more page is for the signal pad.
  EXPECT_EQ(plan.held.parameters, 12 * kPage);
  EXPECT_EQ(plan.held.gradients, 10 * kPage);
  EXPECT_EQ(plan.held.optimizer_state, 2 * 4 * (1056 + 1056));
  EXPECT_EQ(plan.traffic.all_gather.num_calls, 2);
  EXPECT_EQ(plan.traffic.all_gather.payload_bytes, 2 * 4 * 4 * 1056);
  EXPECT_EQ(plan.traffic.all_gather.received_bytes, 2 * 3 * 4 * 1056);
  EXPECT_EQ(plan.traffic.all_reduce.payload_bytes, kAll + kTrailer + kSamples + kDigests);
}

TEST(MemoryPlan, OfStage2KeepsShardsOfGradientsAndTwoBuffers) {
  PlanOptions options = on_ranks(DataStrategy::kZero2, 2);
  options.bucket_caps = {.first_bytes = 1, .bytes = 16'000};
  const MemoryPlan plan = plan_memory(small_model(), options);
  // Buckets are filled in reverse order: the head; b.bias and b.weight; a.bias and a.weight. Their
  // shards have 32, 2,080 and 2,080 elements.
  ASSERT_EQ(plan.parts.size(), 3U);
  EXPECT_EQ(plan.held.parameters, (2 + 6 + 6) * kPage);
  EXPECT_EQ(plan.held.gradients, 4 * (32 + 2080 + 2080));
  EXPECT_EQ(plan.held.optimizer_state, 2 * plan.held.gradients);
  EXPECT_EQ(plan.held.reduction_buffers, 2 * 6 * kPage + 2 * kPage) << "with the trailer's";
  EXPECT_EQ(plan.held.transient, kLayer);
  EXPECT_EQ(plan.traffic.reduce_scatter.received_bytes, kAll / 2);
  EXPECT_EQ(plan.traffic.all_gather.received_bytes, kAll / 2);
  EXPECT_EQ(plan.traffic.all_reduce.payload_bytes, kTrailer + kSamples + kDigests);
}

TEST(MemoryPlan, OfShardedUnitsHoldsTheRootAndTwoUnits) {
  const MemoryPlan plan = plan_memory(small_model(), on_ranks(DataStrategy::kFsdp, 3));
  // The 4,160 elements of a layer give, on 3 ranks, shards of 1,387 elements, padded to 1,408, and
  // the 64 elements of the head give shards of 22, padded to 32.
  constexpr int64_t kUnit = 3 * 1408 * 4;
  constexpr int64_t kRoot = 3 * 32 * 4;
  EXPECT_EQ(plan.held.parameters, (2 + 3 + 3) * kPage);
  EXPECT_EQ(plan.held.gradients, 4 * (32 + 1408 + 1408));
  EXPECT_EQ(plan.held.optimizer_state, 2 * 4 * (32 + 1408 + 1408));
  EXPECT_EQ(plan.held.full_units, kRoot + 2 * kUnit);
  EXPECT_EQ(plan.held.reduction_buffers, 2 * (5 + 1) * kPage + 2 * kPage);
  EXPECT_EQ(plan.held.transient, kHead + kLayer);
  EXPECT_EQ(plan.traffic.all_gather.num_calls, 1 + 2 + 2);
  EXPECT_EQ(plan.traffic.all_gather.payload_bytes, kRoot + 4 * kUnit);
  EXPECT_EQ(plan.traffic.all_gather.received_bytes, (kRoot + 4 * kUnit) / 3 * 2);
  EXPECT_EQ(plan.traffic.reduce_scatter.payload_bytes, kRoot + 2 * kUnit);
  ASSERT_EQ(plan.parts.size(), 3U);
  EXPECT_EQ(plan.parts[1].name, "unit a");
  EXPECT_EQ(plan.parts[1].shard_bytes, 1408 * 4);
  // The last rank owns the remaining elements: 4,160 - 2 * 1,408 = 1,344 of each layer, and none of
  // the head.
  PlanOptions last = on_ranks(DataStrategy::kFsdp, 3);
  last.rank = 2;
  EXPECT_EQ(plan_memory(small_model(), last).held.optimizer_state, 2 * 4 * (2 * 1344));
}

TEST(MemoryPlan, OfUnitsThatStayHoldsAllOfThem) {
  PlanOptions options = on_ranks(DataStrategy::kFsdp, 2);
  options.reshard = Reshard::kAfterBackward;
  options.accumulate = 3;
  const MemoryPlan kept = plan_memory(small_model(), options);
  EXPECT_EQ(kept.held.full_units, kAll);
  // The ranks compare the units that they use twice in a step. The prediction is that a backward is
  // followed by the same kind of pass as the backward before it. It is wrong after the last
  // backward of a step, which an update follows, and after the first one, which a forward follows.
  constexpr int kComparisons = 2;
  EXPECT_EQ(kept.traffic.all_gather.num_calls, 3 * 3 + kComparisons);
  EXPECT_EQ(kept.held.transient, kAll + 4 * 64 * 64) << "whole gradients, and one on its way";
  options.reshard = options.reshard_root = Reshard::kAfterReduction;
  EXPECT_EQ(plan_memory(small_model(), options).traffic.all_gather.num_calls, 3 + kComparisons);
  options.reshard = options.reshard_root = Reshard::kAfterForward;
  EXPECT_EQ(plan_memory(small_model(), options).traffic.all_gather.num_calls, 3 * 6 + kComparisons);
  EXPECT_EQ(plan_memory(small_model(), options).traffic.reduce_scatter.num_calls, 3);
}

TEST(MemoryPlan, OfLowerPrecisionHasACopyOfTheShard) {
  PlanOptions options = on_ranks(DataStrategy::kFsdp, 2);
  options.parameter_dtype = DType::kBfloat16;
  options.reduce_dtype = DType::kFloat32;
  const MemoryPlan plan = plan_memory(small_model(), options);
  // Each rank has its shards of 32, 2,080 and 2,080 elements twice: in float32, and in bfloat16 for
  // gathers. Each number of pages includes one page for the signal pad.
  EXPECT_EQ(plan.held.parameters, (2 + 4 + 4 + 2 + 3 + 3) * kPage);
  EXPECT_EQ(plan.held.full_units, kAll / 2);
  EXPECT_EQ(plan.traffic.all_gather.payload_bytes, (kHead + 4 * kLayer) / 2);
  EXPECT_EQ(plan.traffic.reduce_scatter.payload_bytes, kAll);
  EXPECT_EQ(plan.held.transient, (kHead + kLayer) / 2);
  // The result of a reduction in bfloat16 cannot be written directly to the float32 gradients, so
  // two output buffers are added.
  options.reduce_dtype = DType::kBfloat16;
  EXPECT_EQ(plan_memory(small_model(), options).held.reduction_buffers,
            2 * (3 + 1) * kPage + 2 * 2080 * 2 + 2 * kPage);
}

TEST(MemoryPlan, OfReplicasReducesShardsOverThem) {
  PlanOptions options = on_ranks(DataStrategy::kHsdp, 4);
  options.num_replicas = 2;
  const MemoryPlan plan = plan_memory(small_model(), options);
  const MemoryPlan of_two = plan_memory(small_model(), on_ranks(DataStrategy::kFsdp, 2));
  EXPECT_EQ(plan.held.parameters, of_two.held.parameters);
  EXPECT_EQ(plan.held.gradients, (2 + 4 + 4) * kPage) << "in shared memory";
  EXPECT_EQ(plan.traffic.all_gather, of_two.traffic.all_gather);
  EXPECT_EQ(plan.traffic.all_reduce.payload_bytes, kAll / 2 + kTrailer + kSamples);
  EXPECT_EQ(plan.traffic.all_reduce.num_calls, 5);
}

TEST(MemoryPlan, OfMappedUnitsCopiesNothing) {
  PlanOptions options = on_ranks(DataStrategy::kFsdp, 2);
  options.is_mapped = true;
  const MemoryPlan plan = plan_memory(small_model(), options);
  EXPECT_TRUE(plan.is_mapped);
  EXPECT_EQ(plan.held.full_units, 0);
  EXPECT_EQ(plan.traffic.all_gather.num_calls, 0);
  EXPECT_EQ(plan.held.parameters, (2 + 4 + 4) * kPage) << "shards of whole pages";
  EXPECT_EQ(plan.host_bytes, 2 * plan.held.total());
  options.ranks_per_host = 1;
  EXPECT_FALSE(plan_memory(small_model(), options).is_mapped) << "they share no memory";
  EXPECT_EQ(plan_memory(small_model(), options).traffic.all_gather.num_calls, 5);
}

TEST(MemoryPlan, OfFrozenParametersHasNoGradientsOfThem) {
  ModelSizes model = small_model();
  for (ParameterSize& parameter : model.parameters) {
    parameter.is_trained = parameter.name == "head";
  }
  for (const DataStrategy strategy : {DataStrategy::kDdp, DataStrategy::kZero1}) {
    const MemoryPlan plan = plan_memory(model, on_ranks(strategy, 2));
    EXPECT_EQ(plan.held.gradients, 2 * kPage) << to_string(strategy);
    const int64_t digests = strategy == DataStrategy::kZero1 ? kDigests : 0;
    EXPECT_EQ(plan.traffic.all_reduce.payload_bytes, kHead + kTrailer + kSamples + digests)
        << to_string(strategy);
  }
  const MemoryPlan sharded = plan_memory(model, on_ranks(DataStrategy::kFsdp, 2));
  EXPECT_EQ(sharded.held.gradients, kHead / 2);
  EXPECT_EQ(sharded.traffic.reduce_scatter.payload_bytes, kHead);
}

TEST(MemoryPlan, OfOptimizersCountsTheirValues) {
  PlanOptions options = on_ranks(DataStrategy::kSingle, 1);
  options.optimizer = {.states = 1, .temporaries = 3};
  const MemoryPlan plan = plan_memory(small_model(), options);
  EXPECT_EQ(plan.held.optimizer_state, kAll);
  EXPECT_EQ(plan.held.transient, 3 * 4 * 64 * 64);
}

// The signal pad of symmetric memory has 512 bytes for each rank of the group. Those of 8 ranks
// fill one page, and 9 ranks need a second one.
TEST(MemoryPlan, OfManyRanksHasMorePagesOfSignals) {
  EXPECT_EQ(plan_memory(small_model(), on_ranks(DataStrategy::kDdp, 8)).held.gradients, 10 * kPage);
  EXPECT_EQ(plan_memory(small_model(), on_ranks(DataStrategy::kDdp, 9)).held.gradients, 11 * kPage);
}

TEST(MemoryPlan, OfAHostIsThatOfItsRanksWithTheirBuffers) {
  ModelSizes model = small_model();
  model.buffer_bytes = 1000;
  PlanOptions options = on_ranks(DataStrategy::kDdp, 6);
  options.ranks_per_host = 2;
  const MemoryPlan plan = plan_memory(model, options);
  EXPECT_EQ(plan.held.buffers, 1000);
  EXPECT_EQ(plan.held.total(), kAll + 10 * kPage + 2 * kAll + 1000 + 4 * 64 * 64);
  EXPECT_EQ(plan.host_bytes, 2 * plan.held.total());
}

// The second backward adds to the gradients of the first one, so at most one more whole gradient
// exists at a time.
TEST(MemoryPlan, OfOneRankThatAccumulatesHasOneGradientMore) {
  PlanOptions options = on_ranks(DataStrategy::kSingle, 1);
  options.accumulate = 2;
  EXPECT_EQ(plan_memory(small_model(), options).held.transient, 4 * 64 * 64);
}

std::string refusal_of(const PlanOptions& options, const ModelSizes& model = small_model()) {
  try {
    (void)plan_memory(model, options);
  } catch (const Error& error) {
    return error.code() == ErrorCode::kInvalidArgument ? error.message() : "another code";
  }
  return "none";
}

TEST(MemoryPlan, RefusesWhatDoesNotApply) {
  EXPECT_EQ(refusal_of(on_ranks(DataStrategy::kSingle, 2)),
            "plan_memory: the strategy single is for one rank, but there are 2 ranks");
  PlanOptions options = on_ranks(DataStrategy::kHsdp, 6);
  options.num_replicas = 4;
  EXPECT_EQ(refusal_of(options),
            "plan_memory: num_replicas is 4, which does not divide the 6 ranks");
  options = on_ranks(DataStrategy::kFsdp, 6);
  options.num_replicas = 2;
  EXPECT_THAT(refusal_of(options), HasSubstr("num_replicas is 2, which is for hsdp"));
  options = on_ranks(DataStrategy::kZero2, 2);
  options.is_mapped = true;
  EXPECT_THAT(refusal_of(options), HasSubstr("is_mapped applies to fsdp and hsdp"));
  options.strategy = DataStrategy::kFsdp;
  options.is_on_device = true;
  EXPECT_THAT(refusal_of(options), HasSubstr("is_mapped is for the CPU's memory"));
  options = on_ranks(DataStrategy::kDdp, 2);
  options.parameter_dtype = DType::kBfloat16;
  EXPECT_THAT(refusal_of(options), HasSubstr("give the parameters themselves the dtype"));
  options = on_ranks(DataStrategy::kFsdp, 2);
  options.parameter_dtype = DType::kInt32;
  EXPECT_THAT(refusal_of(options), HasSubstr("not a floating-point dtype"));
  options = on_ranks(DataStrategy::kFsdp, 2);
  options.reshard = Reshard::kOntoGroup;
  EXPECT_THAT(refusal_of(options), HasSubstr("kOntoGroup, which cannot be planned"));
  options = on_ranks(DataStrategy::kFsdp, 2);
  options.accumulate = 0;
  EXPECT_THAT(refusal_of(options), HasSubstr("accumulate is 0"));
  options = on_ranks(DataStrategy::kFsdp, 0);
  EXPECT_THAT(refusal_of(options), HasSubstr("num_ranks is 0"));
  ModelSizes model = small_model();
  model.units[1].parent = 2;
  EXPECT_THAT(refusal_of({}, model), HasSubstr("unit 1 has the parent 2"));
  model = small_model();
  model.parameters[0].unit = 9;
  EXPECT_THAT(refusal_of({}, model),
              HasSubstr("\"a.weight\" is in unit 9, but the model has 3 units"));
}

}  // namespace
}  // namespace cadre
