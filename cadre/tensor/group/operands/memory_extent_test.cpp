#include "cadre/tensor/group/operands/memory_extent.h"

#include <ATen/ops/empty.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cadre {
namespace {

using ::testing::ElementsAre;

TEST(MemoryExtent, EndsBehindTheLastElement) {
  const at::Tensor matrix = at::empty({4, 6}, at::kFloat);
  const auto begin = reinterpret_cast<uintptr_t>(matrix.const_data_ptr());
  const MemoryExtent whole = memory_extent(matrix);
  EXPECT_EQ(whole.begin, begin);
  EXPECT_EQ(whole.end, begin + 4 * 6 * 4);
  // The slice has rows 1 and 2 and columns 2 and 4 of a matrix with 6 columns. Its last element has
  // the index 2 * 6 + 4.
  const MemoryExtent part = memory_extent(matrix.slice(0, 1, 3).slice(1, 2, 6, 2));
  EXPECT_EQ(part.begin, begin + (6 + 2) * 4);
  EXPECT_EQ(part.end, begin + (2 * 6 + 4 + 1) * 4);
  EXPECT_EQ(memory_extent(matrix.t()).end, whole.end);
}

TEST(MemoryExtent, IsAnOffsetOnTheMetaDevice) {
  const at::Tensor vector = at::empty({10}, at::TensorOptions(at::kMeta).dtype(at::kDouble));
  const MemoryExtent extent = memory_extent(vector.slice(0, 3, 5));
  EXPECT_EQ(extent.begin, 3 * 8U);
  EXPECT_EQ(extent.end, 5 * 8U);
}

TEST(ConnectedExtents, AreSetsOfThoseThatOverlap) {
  constexpr uintptr_t kMemory = 4096;
  const auto extent = [](uintptr_t begin, uintptr_t end) {
    return MemoryExtent{kMemory + begin, kMemory + end};
  };
  // Extent 1 contains extent 0, and extent 2 overlaps only extent 1. Extent 3 begins where extent 2
  // ends, so it overlaps none.
  const std::vector<MemoryExtent> extents = {extent(20, 22), extent(10, 40), extent(35, 50),
                                             extent(50, 60), extent(0, 5)};
  EXPECT_THAT(connected_extents(extents),
              ElementsAre(ElementsAre(4), ElementsAre(1, 0, 2), ElementsAre(3)));
  EXPECT_FALSE(extents[2].overlaps(extents[3]));
  EXPECT_TRUE(extents[1].overlaps(extents[2]));
  EXPECT_TRUE(connected_extents({}).empty());
}

}  // namespace
}  // namespace cadre
