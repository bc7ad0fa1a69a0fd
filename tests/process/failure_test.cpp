// Tests a rank that is killed or stopped inside each operation, in memory of the CPU.
#include <gtest/gtest.h>

#include <vector>

#include "cadre/testing/core/seeds.h"
#include "failure_cases.h"

namespace cadre::failures {
namespace {

class FailureTest : public ::testing::TestWithParam<Case> {};

TEST_P(FailureTest, EverySurvivorNamesTheCulpritAndTheGroupIsRebuilt) {
  expect_named_failure(GetParam());
}

std::vector<Case> cases_in(Place place) {
  static constexpr OpKind kKinds[] = {
      OpKind::kBroadcast,     OpKind::kAllReduce, OpKind::kReduce,  OpKind::kAllGather,
      OpKind::kReduceScatter, OpKind::kGather,    OpKind::kScatter, OpKind::kAllToAll,
      OpKind::kAllToAllV,     OpKind::kBarrier,   OpKind::kSend,    OpKind::kRecv};
  return cases_of(kKinds, place);
}

std::string name_of_test(const ::testing::TestParamInfo<Case>& info) {
  return name_of(info.param);
}

INSTANTIATE_TEST_SUITE_P(All, FailureTest, ::testing::ValuesIn(cases_in(Place::kWorld)),
                         name_of_test);
// CTest runs only the chosen share of these cases.
INSTANTIATE_TEST_SUITE_P(Subgroup, FailureTest,
                         ::testing::ValuesIn(testing::share_of(cases_in(Place::kSubgroup))),
                         name_of_test);
INSTANTIATE_TEST_SUITE_P(TwoGroups, FailureTest,
                         ::testing::ValuesIn(testing::share_of(cases_in(Place::kTwoGroups))),
                         name_of_test);

}  // namespace
}  // namespace cadre::failures
