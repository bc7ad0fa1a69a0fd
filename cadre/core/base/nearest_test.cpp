#include "cadre/core/base/nearest.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cadre {
namespace {

TEST(EditDistance, CountsInsertionsDeletionsAndReplacements) {
  EXPECT_EQ(edit_distance("", ""), 0U);
  EXPECT_EQ(edit_distance("heads", "heads"), 0U);
  EXPECT_EQ(edit_distance("", "heads"), 5U);
  EXPECT_EQ(edit_distance("head", "heads"), 1U);
  EXPECT_EQ(edit_distance("heads", "hads"), 1U);
  EXPECT_EQ(edit_distance("train", "trian"), 2U);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
}

TEST(Nearest, FindsTypingErrorsOnly) {
  const std::vector<std::string> known{"run", "train", "info"};
  EXPECT_EQ(nearest("rnu", known), "run");
  EXPECT_EQ(nearest("inof", known), "info");
  EXPECT_EQ(nearest("checkpoint", known), "");
}

}  // namespace
}  // namespace cadre
