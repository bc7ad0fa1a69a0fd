// Tests that local_box() throws for negative sizes and for coordinates outside of the mesh.
#include "cadre/tensor/mesh/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using Placements = std::vector<Placement>;

TEST(LocalBox, RefusesSizesThatNoTensorHas) {
  const std::vector<int> shape = {2, 2};
  const std::vector<int> coordinates = {1, 0};
  const Placements placements = {Shard(0), Shard(1)};
  EXPECT_THAT(failure_of([&] {
                (void)local_box(std::vector<int64_t>{-5, 4}, shape, coordinates, placements);
              }),
              ::testing::HasSubstr("(-5, 4) are not the sizes of a tensor; pass sizes >= 0"));
}

TEST(LocalBox, RefusesCoordinatesThatTheMeshHasNot) {
  const std::vector<int64_t> sizes = {4};
  const std::vector<int> shape = {2, 2};
  const Placements placements = {Shard(0), Replicate()};
  const auto failure = [&](const std::vector<int>& coordinates) {
    return failure_of([&] { (void)local_box(sizes, shape, coordinates, placements); });
  };
  EXPECT_THAT(failure({0}), ::testing::HasSubstr("1 coordinates for a mesh of 2 axes"));
  EXPECT_THAT(failure({0, 2}), ::testing::HasSubstr("coordinate 2 of axis 1 is not in 0 .. 1"));
  EXPECT_THAT(failure({-1, 0}), ::testing::HasSubstr("coordinate -1 of axis 0"));
}

}  // namespace
}  // namespace cadre
