// Tests which units are gathered at the same time during a step.
#include "cadre/parallel/plan/unit_residency.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace cadre {
namespace {

using ::testing::ElementsAre;

// The root (100 bytes) contains a unit of 10 bytes, which contains two units of 1 and 2 bytes, and
// then a unit of 5 bytes.
TEST(UnitResidency, KeepsAParentWhileItsUnitsCompute) {
  std::vector<ResidentUnit> units = {{.parent = 0, .full_bytes = 100},
                                     {.parent = 0, .full_bytes = 10},
                                     {.parent = 1, .full_bytes = 1},
                                     {.parent = 1, .full_bytes = 2},
                                     {.parent = 0, .full_bytes = 5}};
  units[0].reshard = Reshard::kAfterBackward;
  Residency residency = residency_of(units, {});
  EXPECT_EQ(residency.peak_bytes, 100 + 10 + 2 + 5) << "in the second, with the last prefetched";
  EXPECT_THAT(residency.num_gathers, ElementsAre(1, 2, 2, 2, 2));
  EXPECT_EQ(residency_of(units, {.num_prefetched = 0}).peak_bytes, 100 + 10 + 2);
  // The root and the first two units are frozen. Unit 2 ends before the first trained parameter, so
  // no backward gathers it.
  for (const size_t unit : {0, 1, 2}) units[unit].has_trained = false;
  residency = residency_of(units, {});
  EXPECT_THAT(residency.num_gathers, ElementsAre(1, 2, 1, 2, 2));
}

}  // namespace
}  // namespace cadre
