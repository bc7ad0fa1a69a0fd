#include "cadre/tensor/hooks/shard_mark.h"

#include <ATen/ops/empty.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cadre/testing/core/ranks.h"

namespace cadre::shard_mark_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using wrap::mark_as_of_stage;
using wrap::mark_as_shard;
using wrap::part_of;
using wrap::shard_mark_of;

TEST(ShardMark, GoesWithTheTensorAndWithWhatDetachMakesOfIt) {
  const at::Tensor shard = at::empty({3});
  EXPECT_EQ(shard_mark_of(shard), nullptr);
  EXPECT_EQ(shard_mark_of(at::Tensor()), nullptr);
  mark_as_shard(shard, {.parameter = "weight", .owner = "in unit 1", .rank = 2, .num_ranks = 4});
  ASSERT_NE(shard_mark_of(shard), nullptr);
  EXPECT_EQ(shard_mark_of(shard)->rank, 2);
  const at::Tensor detached = shard.detach();
  ASSERT_NE(shard_mark_of(detached), nullptr);
  // A new mark on the detached tensor must not change the mark of the original.
  mark_as_shard(detached, {.parameter = "weight", .rank = 3, .num_ranks = 4});
  EXPECT_EQ(shard_mark_of(detached)->rank, 3);
  EXPECT_EQ(shard_mark_of(shard)->rank, 2);
}

TEST(ShardMark, AStageIsAnotherMark) {
  const at::Tensor parameter = at::empty({3});
  mark_as_of_stage(parameter, {.parameter = "weight", .stage = 1, .rank = 1, .num_ranks = 2});
  EXPECT_EQ(shard_mark_of(parameter), nullptr);
  mark_as_shard(parameter, {.parameter = "weight", .rank = 1, .num_ranks = 2});
  EXPECT_NE(shard_mark_of(parameter), nullptr);
}

TEST(ShardMark, ANumberTellsPartsOfOneParameterApart) {
  const at::Tensor plain = at::empty({8});
  EXPECT_EQ(part_of(plain, 4), part_of(at::empty({8}), 4));
  EXPECT_NE(part_of(plain, 4), part_of(plain, 0));
  const at::Tensor divided = at::empty({8});
  mark_as_shard(divided, {.parameter = "weight", .rank = 0, .num_ranks = 2, .part = 7});
  EXPECT_NE(part_of(divided, 4), part_of(plain, 4));
}

TEST(ShardMark, AListWithShardsIsRefusedWithThePlaceOfTheFirst) {
  std::vector<at::Tensor> parameters = {at::empty({2}), at::empty({2}), at::empty({2})};
  const auto refusal = [&] {
    return testing::failure_of([&] { wrap::refuse_shards(parameters, "norm_of", ", p"); });
  };
  EXPECT_EQ(refusal(), "");
  mark_as_of_stage(parameters[2], {.parameter = "bias", .stage = 3, .rank = 1, .num_ranks = 2});
  EXPECT_THAT(refusal(), AllOf(HasSubstr("norm_of: parameter 2 of 3"),
                               HasSubstr("\"bias\" of stage 3 (rank 1 of the 2 of its pipeline)"),
                               HasSubstr("Call norm_of(model, p) with the wrapper"),
                               HasSubstr("call norm_of(records, p) with the records")));
  mark_as_shard(parameters[1],
                {.parameter = "weight", .owner = "in unit 1", .rank = 1, .num_ranks = 3});
  EXPECT_THAT(refusal(), AllOf(HasSubstr("parameter 1 of 3"), HasSubstr("shard of \"weight\"")));
  EXPECT_EQ(testing::failure_of(
                [&] { wrap::refuse_shard_as_whole("weight", parameters[0], "save()", ""); }),
            "");
  EXPECT_THAT(testing::failure_of([&] {
                wrap::refuse_shard_as_whole("weight", parameters[1], "save()", "Gather it.");
              }),
              AllOf(HasSubstr("save(): \"weight\" is not the whole parameter"),
                    HasSubstr("in unit 1 (rank 1 of the 3 that divide it). Gather it.")));
}

}  // namespace
}  // namespace cadre::shard_mark_test
