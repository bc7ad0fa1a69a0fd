// Sharded training on 1 to 8 ranks, as threads, equals training in one process: the same gradients,
// and the same parameters after 20 steps, within the bounds of wrap_bounds.h, however long
// units keep their parameters. The check itself is proved: without a gather, a reduction, the
// division or the initial broadcast it fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/fsdp_training.h"
#include "cadre/testing/torch/wrap_bounds.h"

namespace cadre {
namespace {

using testing::all_units;
using testing::bits_of;
using testing::Case;
using testing::compare;
using testing::Comparison;
using testing::FakeGroup;
using testing::GroupCall;
using testing::make_batches;
using testing::train_alone;
using testing::train_sharded;
using testing::Training;
using testing::worse_of;

constexpr uint64_t kSeed = 1;

struct Mode {
  const char* name;
  Reshard reshard;
  Reshard reshard_root = Reshard::kAfterBackward;
  int num_prefetched = 1;
};

std::ostream& operator<<(std::ostream& out, const Mode& mode) {
  return out << mode.name;
}

class FsdpEquality : public ::testing::TestWithParam<std::tuple<Case, Mode>> {};

TEST_P(FsdpEquality, EqualsOneProcessOnEveryNumberOfRanks) {
  const auto& [test_case, mode] = GetParam();
  const auto batches = make_batches(test_case, kSeed);
  const Training alone = train_alone(test_case, batches, kSeed);
  std::vector<int> world_sizes = {1, 2, 3, 4};
  if (test_case.model == "gpt" && mode.reshard == Reshard::kAfterForward) world_sizes.push_back(8);
  for (const int world_size : world_sizes) {
    FullyShardedDataParallelOptions options = all_units(test_case, world_size);
    options.reshard = mode.reshard;
    options.reshard_root = mode.reshard_root;
    options.num_prefetched = mode.num_prefetched;
    const auto trained = train_sharded(test_case, batches, kSeed, world_size, options);
    for (int rank = 0; rank < world_size; ++rank) {
      const std::string where = std::to_string(world_size) + " ranks, rank " + std::to_string(rank);
      ASSERT_EQ(trained[rank].gradients.size(), alone.gradients.size()) << where;
      const Comparison comparison = compare(test_case, trained[rank], alone);
      EXPECT_LE(comparison.first_gradients, 1) << where;
      if (testing::uses_adamw_bound(test_case)) {
        EXPECT_LE(comparison.gradients, 1) << where;
      }
      EXPECT_LE(comparison.parameters, 1) << where;
    }
  }
}

std::vector<Case> cases() {
  std::vector<Case> cases;
  for (const char* model : {"mlp", "cnn", "gpt"}) {
    cases.push_back({model, "sgd", model == std::string("mlp") ? 48 : 25, torch::kDouble});
    cases.push_back({model, "adamw", 25, torch::kFloat});
  }
  return cases;
}

std::string name_of_case(const ::testing::TestParamInfo<std::tuple<Case, Mode>>& parameter) {
  return ::testing::PrintToString(std::get<0>(parameter.param)) + "_" +
         std::get<1>(parameter.param).name;
}

INSTANTIATE_TEST_SUITE_P(
    Cases, FsdpEquality,
    ::testing::Combine(::testing::ValuesIn(cases()),
                       ::testing::Values(Mode{"after_forward", Reshard::kAfterForward},
                                         Mode{"root_too", Reshard::kAfterForward,
                                              Reshard::kAfterForward, 0},
                                         Mode{"after_backward", Reshard::kAfterBackward},
                                         Mode{"after_reduction", Reshard::kAfterReduction,
                                              Reshard::kAfterReduction})),
    name_of_case);

TEST(FsdpDeterminism, EveryModeGivesTheSameBits) {
  const Case test_case{"gpt", "adamw", 25, torch::kFloat};
  const auto batches = make_batches(test_case, kSeed);
  FullyShardedDataParallelOptions options = all_units(test_case, 3);
  const auto first = train_sharded(test_case, batches, kSeed, 3, options);
  options.reshard = Reshard::kAfterReduction;
  options.num_prefetched = 0;
  options.wrap_policy = {};  // no unit but the root
  const auto second = train_sharded(test_case, batches, kSeed, 3, options);
  EXPECT_EQ(bits_of(first[1].parameters), bits_of(second[2].parameters));
}

// The mutation check. Each fault is the same on all ranks.
enum class Fault { kNoGather, kNoReduction, kNoDivision, kNoInitialBroadcast };

ProcessGroup faulty(const ProcessGroup& group, Fault fault) {
  const FakeGroup fake(group);
  const int rank = group.rank();
  const int world_size = group.world_size();
  fake.on_call = [fault, rank, world_size, num_gathers = 0](GroupCall& call) mutable {
    if (fault == Fault::kNoGather && call.kind == OpKind::kAllGather && call.is_of_values() &&
        ++num_gathers > 8) {
      // After the first step: what is gathered are the values of the initial broadcast.
      call.output.view({world_size, -1})[rank].copy_(call.input);
      return;
    }
    if (call.kind == OpKind::kReduceScatter) {
      if (fault == Fault::kNoReduction) {
        call.output.copy_(call.input.view({world_size, -1})[rank]);
        return;
      }
      if (fault == Fault::kNoDivision && call.op() == ReduceOp::kAvg) {
        call.reduce_with(ReduceOp::kSum);
      }
    }
    if (fault == Fault::kNoInitialBroadcast && call.kind == OpKind::kBroadcast &&
        call.output.scalar_type() == at::kByte) {
      if (call.root != rank) call.output.zero_();
      return;
    }
    call.pass_on();
  };
  return fake.group();
}

class FsdpEqualityNotices : public ::testing::TestWithParam<Fault> {};

TEST_P(FsdpEqualityNotices, TheFault) {
  const Case test_case{"mlp", "sgd", 48, torch::kDouble};
  const auto batches = make_batches(test_case, kSeed);
  const Training alone = train_alone(test_case, batches, kSeed);
  Comparison worst;
  for (const Training& rank :
       train_sharded(test_case, batches, kSeed, 2, all_units(test_case, 2),
                     [](const ProcessGroup& group) { return faulty(group, GetParam()); })) {
    worst = worse_of(worst, compare(test_case, rank, alone));
  }
  EXPECT_GT(worst.gradients, 1e3);
  EXPECT_GT(worst.parameters, 1e3);
}

INSTANTIATE_TEST_SUITE_P(Faults, FsdpEqualityNotices,
                         ::testing::Values(Fault::kNoGather, Fault::kNoReduction,
                                           Fault::kNoDivision, Fault::kNoInitialBroadcast));

}  // namespace
}  // namespace cadre
