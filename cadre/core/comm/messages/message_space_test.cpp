#include "cadre/core/comm/messages/message_space.h"

#include <gtest/gtest.h>

namespace cadre {
namespace {

TEST(MessageSpace, ATagIsDescribedWithTheUserOfItsSpace) {
  EXPECT_EQ(MessageSpace().describe(7), "tag 7");
  EXPECT_EQ(MessageSpace::of_number(3, "cadre::Pipeline").describe(7), "tag 7 of cadre::Pipeline");
  EXPECT_EQ(MessageSpace::of_number(3).describe(-1), "tag -1 of wrapper 3 of the group");
}

// A space that was made from a received header has no user text, so equality must compare only the
// numbers.
TEST(MessageSpace, SpacesOfOneNumberAreEqual) {
  EXPECT_EQ(MessageSpace::of_number(3, "cadre::Pipeline"), MessageSpace::of_number(3));
  EXPECT_FALSE(MessageSpace::of_number(3) == MessageSpace());
}

}  // namespace
}  // namespace cadre
