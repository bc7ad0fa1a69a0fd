#include "cadre/core/comm/queue/refused_call.h"

#include <gtest/gtest.h>

#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

TEST(RefusedCall, ARankOutsideOfTheGroupIsNamedWithTheCall) {
  check_rank("put", "the peer", 0, 4);
  check_rank("put", "the peer", 3, 4);
  EXPECT_EQ(testing::failure_of([] { check_rank("put", "the peer", 4, 4); }),
            "kInvalidArgument: put: the peer 4 is not in the group of 4 ranks");
  EXPECT_EQ(testing::failure_of([] { check_rank("get", "this rank", -1, 2); }),
            "kInvalidArgument: get: this rank -1 is not in the group of 2 ranks");
}

}  // namespace
}  // namespace cadre
