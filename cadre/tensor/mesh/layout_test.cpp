#include "cadre/tensor/mesh/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace cadre {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Shape = std::vector<int>;
using Placements = std::vector<Placement>;

TEST(PlacementLayout, ChunksAreThoseOfTorchChunk) {
  // The chunks of 10 elements have 3, 3, 3 and 1 elements on 4 ranks, and 2, 2, 2, 2, 2 and 0 on 6
  // ranks.
  EXPECT_EQ(chunk_of(10, 4, 0).begin, 0);
  EXPECT_EQ(chunk_of(10, 4, 2).begin, 6);
  EXPECT_EQ(chunk_of(10, 4, 2).size, 3);
  EXPECT_EQ(chunk_of(10, 4, 3).begin, 9);
  EXPECT_EQ(chunk_of(10, 4, 3).size, 1);
  EXPECT_EQ(chunk_of(10, 6, 5).begin, 10);
  EXPECT_EQ(chunk_of(10, 6, 5).size, 0);
  EXPECT_EQ(full_chunk(10, 6), 2);
}

TEST(PlacementLayout, AnAxisShardsReplicatesOrReduces) {
  const PlacementLayout layout(Shape{2, 3, 1},
                               Placements{Shard(1), Partial(ReduceOp::kMax), Shard(0)}, 2);
  EXPECT_THAT(layout.shards(1), ElementsAre(0));
  EXPECT_THAT(layout.shards(0), IsEmpty()) << "an axis of size 1 divides nothing";
  EXPECT_TRUE(layout.is_sharded(0));
  EXPECT_EQ(layout.partial(1), ReduceOp::kMax);
  EXPECT_FALSE(layout.is_replicated(1));
  EXPECT_TRUE(layout.is_replicated(2));
}

TEST(PlacementLayout, AxesOfOneDimDivideItInTheirOrder) {
  const Shape mesh = {2, 2};
  const std::vector<int64_t> sizes = {10, 3};
  const PlacementLayout layout(mesh, Placements{Shard(0), Shard(0)}, 2);
  // Axis 0 divides 10 elements into 5 and 5, and axis 1 divides each 5 into 3 and 2.
  const auto box = [&](int first, int second) {
    return layout.box_of(sizes, Shape{first, second});
  };
  EXPECT_EQ(box(0, 1), (Box{{3, 0}, {2, 3}}));
  EXPECT_EQ(box(1, 0), (Box{{5, 0}, {3, 3}}));
  EXPECT_EQ(box(1, 1), (Box{{8, 0}, {2, 3}}));

  PlacementLayout reversed(mesh, Placements{Replicate(), Shard(0)}, 2);
  reversed.add_shard(0, 0);
  EXPECT_EQ(reversed.box_of(sizes, Shape{0, 1}), (Box{{5, 0}, {3, 3}}));
}

TEST(PlacementLayout, TheNextShardContinuesTheOrderOfTheTarget) {
  const Shape mesh = {2, 2, 2};
  const PlacementLayout target(mesh, Placements{Shard(0), Shard(0), Shard(1)}, 2);
  const PlacementLayout begun(mesh, Placements{Shard(0), Replicate(), Replicate()}, 2);
  EXPECT_EQ(begun.next_shard(0, target), 1U);
  EXPECT_EQ(begun.next_shard(1, target), 2U);
  const PlacementLayout other(mesh, Placements{Replicate(), Shard(0), Replicate()}, 2);
  EXPECT_EQ(other.next_shard(0, target), std::nullopt) << "axis 1 is not the first";
  EXPECT_EQ(target.next_shard(0, target), std::nullopt) << "nothing is left";
}

TEST(PlacementLayout, ElementsMoveAlongTheAxesBehindTheCommonOnes) {
  const Shape mesh = {2, 2, 2};
  const PlacementLayout from(mesh, Placements{Shard(0), Shard(0), Replicate()}, 2);
  const PlacementLayout to(mesh, Placements{Shard(0), Shard(1), Replicate()}, 2);
  EXPECT_THAT(from.involved_axes(to), ElementsAre(1));
  EXPECT_THAT(from.involved_axes(from), IsEmpty());
  const PlacementLayout none(mesh, Placements{Replicate(), Replicate(), Shard(1)}, 2);
  EXPECT_THAT(from.involved_axes(none), ElementsAre(0, 1, 2));
}

TEST(PlacementLayout, DisjointBoxesHaveNoCommonElement) {
  EXPECT_EQ(intersection({{2, 0}, {4, 3}}, {{4, 1}, {9, 9}}), (Box{{4, 1}, {2, 2}}));
  EXPECT_EQ(intersection({{0}, {3}}, {{3}, {5}}).numel(), 0);
  EXPECT_EQ(intersection({{0}, {3}}, {{7}, {5}}).numel(), 0) << "and no negative size";
}

}  // namespace
}  // namespace cadre
