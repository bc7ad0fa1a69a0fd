#include "cadre/launch/job/output/line_prefix.h"

#include <gtest/gtest.h>

namespace cadre::launch {
namespace {

const PrefixValues kValues = {.rank = 7, .role = "${rank}", .host = "node0"};

TEST(LinePrefix, HasTheWorkersValues) {
  EXPECT_EQ(line_prefix("[${rank}/${local_rank} ${host}] ", kValues), "[7/7 node0] ");
  EXPECT_EQ(line_prefix("${restart_count}: ", {.rank = 7, .restart_count = 12}), "12: ");
  EXPECT_EQ(line_prefix("", kValues), "");
  EXPECT_EQ(line_prefix("$rank ${ rank} ${rank", kValues), "$rank ${ rank} ${rank");
}

TEST(LinePrefix, AValueIsNotSearchedAgain) {
  EXPECT_EQ(line_prefix("${role_name}${rank}", kValues), "${rank}7");
}

TEST(LinePrefix, AnArgumentMayHaveTheLocalRank) {
  EXPECT_EQ(with_local_rank("--log=r${local_rank}.${local_rank}", 3), "--log=r3.3");
  EXPECT_EQ(with_local_rank("${rank}", 3), "${rank}");
}

}  // namespace
}  // namespace cadre::launch
