#include "cadre/core/memory/free_ranges.h"

#include <gtest/gtest.h>

namespace cadre {
namespace {

TEST(FreeRangesTest, TakesTheFirstPartThatIsLongEnough) {
  FreeRanges free(100);
  EXPECT_EQ(free.take(30), 0u);
  EXPECT_EQ(free.take(10), 30u);
  EXPECT_EQ(free.take(60), 40u);
  EXPECT_EQ(free.take(1), std::nullopt);
  EXPECT_EQ(free.num_bytes(), 0u);
  free.give({0, 30});
  free.give({40, 60});
  EXPECT_EQ(free.take(31), 40u);
  EXPECT_EQ(free.take(30), 0u);
  EXPECT_EQ(free.num_bytes(), 29u);
}

TEST(FreeRangesTest, JoinsWithBothNeighbours) {
  FreeRanges free(90);
  ASSERT_EQ(free.take(30), 0u);
  ASSERT_EQ(free.take(30), 30u);
  free.give({0, 30});
  EXPECT_EQ(free.longest(), 30u);
  free.give({30, 30});
  EXPECT_EQ(free.longest(), 90u);
  EXPECT_EQ(free.take(90), 0u);
  EXPECT_EQ(free.take(1), std::nullopt);
}

}  // namespace
}  // namespace cadre
