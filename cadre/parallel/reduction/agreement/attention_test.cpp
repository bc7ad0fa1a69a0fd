// Tests what the counts of three ranks show. The test adds the counts up itself, as an all_reduce
// would.
#include "cadre/parallel/reduction/agreement/attention.h"

#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/testing/core/ranks.h"

namespace cadre::reduction {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kRanks = 3;

class AttentionTest : public ::testing::Test {
 protected:
  AttentionTest() {
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks_.emplace_back(
          /*num_parameters=*/2,
          std::make_shared<const Wrapper>(Wrapper{.name = "DistributedDataParallel",
                                                  .component = "ddp",
                                                  .module = "Net",
                                                  .rank = rank,
                                                  .rank_text = "rank " + std::to_string(rank),
                                                  .number = 4}),
          kRanks);
      ranks_.back().set_wrapper(4);
    }
  }

  // Adds the counts of ranks 1 and 2 to those of rank 0, and returns rank 0's object.
  const Attention& reduced() {
    for (int rank = 1; rank < kRanks; ++rank) ranks_[0].counts().add_(ranks_[rank].counts());
    return ranks_[0];
  }

  std::vector<Attention> ranks_;
};

TEST_F(AttentionTest, CountsAreThoseOfEachParameterAndRank) {
  ranks_[0].set_used(0);
  ranks_[2].set_used(0);
  ranks_[1].set_frozen(1);
  ranks_[1].set_suspicion(6);
  ranks_[2].set_exchanged();
  const Attention& all = reduced();
  EXPECT_EQ(all.num_users(0), 2);
  EXPECT_EQ(all.num_users(1), 0);
  EXPECT_EQ(all.num_frozen(0), 0);
  EXPECT_EQ(all.num_frozen(1), 1);
  EXPECT_EQ(all.suspicion(1), 6U);
  EXPECT_EQ(all.suspicion(2), 0U);
  EXPECT_TRUE(all.some_have_suspicion(2));
  EXPECT_FALSE(all.some_have_suspicion(8));
  EXPECT_TRUE(all.some_have_exchanged());
  EXPECT_TRUE(all.ranks_are_in_one_step());
}

TEST_F(AttentionTest, ReplicasMayDifferAfterUnlikeWritesOrSamples) {
  for (Attention& rank : ranks_) rank.set_num_writes(200);
  ranks_[2].set_samples(0xfedcba98);
  const Attention& all = reduced();
  EXPECT_FALSE(all.num_writes_differ());
  EXPECT_TRUE(all.samples_differ());
  EXPECT_TRUE(all.replicas_may_differ());
  EXPECT_FALSE(all.some_have_exchanged());
}

TEST_F(AttentionTest, RanksInDifferentStepsAreToldTheirSteps) {
  ranks_[2].set_position({.num_older = 1});
  const Attention& all = reduced();
  EXPECT_FALSE(all.ranks_are_in_one_step());
  EXPECT_THAT(cadre::testing::failure_of([&] { all.check_ranks_are_in_one_step(7); }),
              AllOf(HasSubstr("kInvalidArgument: DistributedDataParallel, rank 0: "),
                    HasSubstr("rank 0 is in step 7 and rank 2 in step 8; 0 and 1 forwards")));
}

TEST_F(AttentionTest, RanksInDifferentPartsOfAStepAreToldSo) {
  ranks_[1].set_position({.num_newer = 2});
  ranks_[2].set_position({.num_newer = 2});
  EXPECT_THAT(cadre::testing::failure_of([&] { reduced().check_ranks_are_in_one_step(7); }),
              HasSubstr("after it, 0 newer forwards on rank 0 and 2 on rank 1 still have"));
}

TEST_F(AttentionTest, AnotherWrapperComesBeforeAnotherStep) {
  ranks_[1].set_position({.num_older = 1});
  ranks_[2].set_wrapper(5 | kGotOtherBuffers);
  EXPECT_THAT(
      cadre::testing::failure_of([&] { reduced().check_ranks_are_in_one_step(7); }),
      AllOf(HasSubstr("rank 0 uses wrapper #4 and rank 2"),
            HasSubstr("uses wrapper #5 (whose forward got the buffers of another wrapper)")));
}

TEST_F(AttentionTest, TheRankThatGaveUpIsNamed) {
  ranks_[1].set_gave_up();
  EXPECT_THAT(cadre::testing::failure_of([&] { reduced().check_no_rank_gave_up(); }),
              HasSubstr("kAborted: DistributedDataParallel, rank 0: rank 1 left this backward"));
}

TEST(RanksText, NamesTheRanksOfAFlag) {
  const at::Tensor flags = at::tensor({0, 1, 1, 1, 1, 1}, at::kByte).view({kRanks, 2});
  EXPECT_EQ(ranks_text(flags, 0, 1), "ranks 1, 2");
  EXPECT_EQ(ranks_text(flags, 0, 0), "rank 0");
  EXPECT_EQ(ranks_text(flags, 1, 1), "all ranks");
}

}  // namespace
}  // namespace cadre::reduction
