// Tests check_on_all_ranks() and related functions: an error of one rank is thrown on all ranks,
// fields that differ between ranks are found, and the group stays usable.
#include "cadre/tensor/group/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/tensor/group/caught_error.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::run_groups;

// Runs the body on every rank and returns the error of each rank as "kCode culprit: message".
// Checks with an all_reduce that the group still works afterwards.
std::vector<std::string> thrown_on_ranks(int world_size,
                                         const std::function<void(const ProcessGroup&)>& body) {
  const testing::RanksResult result =
      run_groups(world_size, [&](const ProcessGroup& group, std::string& output) {
        try {
          body(group);
          output = "nothing";
        } catch (const Error& error) {
          const auto culprit = error.details().culprit;
          output = std::string(to_string(error.code())) + " " +
                   (culprit ? std::to_string(culprit->value) : "-") + ": " + error.message();
        }
        const at::Tensor sum = at::ones({1}, at::kLong);
        group.all_reduce(sum);
        testing::require(sum.item<int64_t>() == group.world_size(), "the sum afterwards");
      });
  EXPECT_TRUE(result.ok()) << result.failures();
  std::vector<std::string> thrown;
  for (const testing::RankOutcome& rank : result.ranks) thrown.push_back(rank.output);
  return thrown;
}

TEST(AgreementTest, ARefusalOfOneRankIsThrownOnAllAndNamesIt) {
  const std::string expected =
      "kCorruption 1: the file is damaged (on rank 1 of 3 of group \"world\")";
  EXPECT_THAT(thrown_on_ranks(3,
                              [](const ProcessGroup& group) {
                                check_on_all_ranks(group, "load", [&] {
                                  if (group.rank() == 1) {
                                    throw Error(ErrorCode::kCorruption, "the file is damaged");
                                  }
                                });
                              }),
              ElementsAre(expected, expected, expected));
}

TEST(AgreementTest, AnyThrownTypeIsARefusal) {
  const auto thrown_by = [](const std::function<void()>& check) {
    const auto thrown = thrown_on_ranks(2, [&](const ProcessGroup& group) {
      check_on_all_ranks(group, "load", [&] {
        if (group.rank() == 1) check();
      });
    });
    EXPECT_EQ(thrown[0], thrown[1]);
    return thrown[0];
  };
  EXPECT_THAT(thrown_by([] { throw std::out_of_range("no such layer"); }),
              HasSubstr("kInvalidArgument 1: no such layer (on rank 1"));
  EXPECT_THAT(thrown_by([] { throw std::bad_alloc(); }),
              HasSubstr("kUnavailable 1: out of memory"));
  EXPECT_THAT(thrown_by([] { throw 7; }),
              HasSubstr("kInvalidArgument 1: an exception that is no std::exception"));
  const std::string of_torch = thrown_by([] { at::ones({2}).view({3}); });
  EXPECT_THAT(of_torch, HasSubstr("kInvalidArgument 1: shape '[3]' is invalid"));
  EXPECT_THAT(of_torch, ::testing::Not(HasSubstr("frame #")));
}

TEST(AgreementTest, WhatAllRanksRefuseNamesNoRank) {
  const auto thrown = thrown_on_ranks(2, [](const ProcessGroup& group) {
    check_on_all_ranks(group, "load", [] { throw Error(ErrorCode::kInvalidArgument, "no units"); });
  });
  EXPECT_THAT(thrown, ElementsAre("kInvalidArgument -: no units", "kInvalidArgument -: no units"));
}

TEST(AgreementTest, OneRankAloneThrowsTheSameError) {
  EXPECT_THAT(
      thrown_on_ranks(
          1, [](const ProcessGroup& group) { check_on_all_ranks(group, "load", [] { throw 7; }); }),
      ElementsAre("kInvalidArgument -: an exception that is no std::exception"));
}

TEST(AgreementTest, GathersTextsOfAnyLength) {
  const testing::RanksResult result = run_groups(3, [](const ProcessGroup& group,
                                                       std::string& out) {
    // The length of each rank's text.
    const std::vector<size_t> lengths = {2000, 0, 1};
    const auto texts = gather_texts(group, "texts", [&] {
      return std::string(lengths[static_cast<size_t>(group.rank())],
                         static_cast<char>('a' + group.rank()));
    });
    testing::require(texts == std::vector<std::string>{std::string(2000, 'a'), "", "c"}, "texts");
    for (const std::string& text : gather_texts(group, "texts", [] { return std::string(); })) {
      testing::require(text.empty(), "empty texts");
    }
    const auto outcomes = gather_outcomes(group, "outcomes", [&]() -> std::string {
      if (group.rank() == 2) throw Error(ErrorCode::kUnavailable, "disk full");
      return "done";
    });
    out = *outcomes[0] + *outcomes[1] + outcomes[2].error().message();
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, "donedonedisk full");
}

TEST(AgreementTest, GathersWordsInOneCollectiveAndThrowsARefusalOnAll) {
  const std::string expected = "kInvalidArgument 2: no rows (on rank 2 of 3 of group \"world\")";
  EXPECT_THAT(
      thrown_on_ranks(3,
                      [](const ProcessGroup& group) {
                        const int64_t rank = group.rank();
                        const uint64_t before = group.communicator().num_collectives();
                        const auto words = gather_words(group, "step", 2, [&] {
                          return std::vector<int64_t>{rank, -10 * rank};
                        });
                        testing::require(group.communicator().num_collectives() == before + 1,
                                         "one collective");
                        testing::require(
                            words == std::vector<std::vector<int64_t>>{{0, 0}, {1, -10}, {2, -20}},
                            "the words by rank");
                        gather_words(group, "step", 1, [&] {
                          if (rank == 2) throw Error(ErrorCode::kInvalidArgument, "no rows");
                          return std::vector<int64_t>{rank};
                        });
                      }),
      ElementsAre(expected, expected, expected));
}

TEST(AgreementTest, NamesTheFieldThatDiffers) {
  const auto compare = [](int64_t rank_2_seed, bool rank_1_has_more) {
    return thrown_on_ranks(3, [&](const ProcessGroup& group) {
      check_equal_on_all_ranks(
          group, "DataLoader",
          [&] {
            std::vector<AgreedField> fields = {
                {"batch_size", "8"}, {"seed", std::to_string(group.rank() == 2 ? rank_2_seed : 1)}};
            if (group.rank() == 1 && rank_1_has_more) fields.push_back({"split", "4"});
            return fields;
          },
          "pass the same options on all ranks");
    });
  };
  EXPECT_THAT(compare(1, false), ElementsAre("nothing", "nothing", "nothing"));
  const std::string seeds =
      "kInvalidArgument 2: DataLoader on group \"world\": seed is 1 on rank 0 and 5 on rank 2; "
      "pass "
      "the same options on all ranks";
  EXPECT_THAT(compare(5, false), ElementsAre(seeds, seeds, seeds));
  const std::string more =
      "kInvalidArgument 1: DataLoader on group \"world\": the ranks compare different values: rank "
      "0 has nothing more where rank 1 has "
      "split; pass the same options on all ranks";
  EXPECT_THAT(compare(1, true), ElementsAre(more, more, more));
}

// "ab" + "c" and "a" + "bc" have the same characters, and a value may contain any byte, so the
// comparison must include the lengths.
TEST(AgreementTest, FieldsAreComparedWithTheirBoundaries) {
  const auto thrown = thrown_on_ranks(2, [](const ProcessGroup& group) {
    check_equal_on_all_ranks(
        group, "Options",
        [&]() -> std::vector<AgreedField> {
          if (group.rank() == 0) return {{"ab", "c\n"}};
          return {{"a", "bc\n"}};
        },
        "pass the same");
  });
  EXPECT_THAT(thrown[0], HasSubstr("rank 0 has ab where rank 1 has a; pass the same"));
  EXPECT_EQ(thrown[0], thrown[1]);
}

TEST(AgreementTest, RanksInAgreementsOfDifferentCallsAreToldSo) {
  const auto thrown = thrown_on_ranks(2, [](const ProcessGroup& group) {
    check_on_all_ranks(group, group.rank() == 0 ? "DataLoader" : "DeviceMesh", [] {});
  });
  EXPECT_THAT(thrown[0], HasSubstr("kInvalidArgument 1: DataLoader on group \"world\": the ranks "
                                   "are in different calls: rank 0 is in "
                                   "DataLoader and rank 1 is in DeviceMesh; make these calls"));
  EXPECT_THAT(thrown[1], HasSubstr("rank 0 is in DataLoader and rank 1 is in DeviceMesh"));
}

TEST(AgreementTest, WaitsForTheTimeoutOfTheCall) {
  const testing::RanksResult result = run_groups(2, [](const ProcessGroup& group) {
    if (group.rank() == 1) {
      // Rank 1 does not join the agreement. It waits until rank 0's timeout has failed the group.
      while (!group.error()) {
        at::ones({1});
      }
      return;
    }
    const AgreementSubject subject("save", std::chrono::milliseconds(50));
    const std::string failure =
        testing::failed_fields_of([&] { check_on_all_ranks(group, subject, [] {}); });
    testing::require(failure.starts_with("kTimeout culprit=1"), failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
