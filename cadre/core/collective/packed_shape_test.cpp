#include "cadre/core/collective/packed_shape.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"

namespace cadre {
namespace {

using Sizes = std::vector<int64_t>;

std::string text_of(const Sizes& sizes, uint64_t num_elements = 6) {
  return PackedShape(sizes).to_string(num_elements);
}

TEST(PackedShape, ReadsAsTheSizes) {
  EXPECT_EQ(text_of({}), "x []");
  EXPECT_EQ(text_of({2, 3}), "x [2, 3]");
  EXPECT_EQ(text_of({3, 2}), "x [3, 2]");
  EXPECT_EQ(text_of({6, 1}), "x [6, 1]");
  EXPECT_EQ(text_of({0, 8, 64, 511, 512}), "x [0, 8, 64, 511, 512]");
  EXPECT_EQ(text_of({64, 3, 224, 224}), "x [64, 3, 224, 224]");
  EXPECT_EQ(text_of({8, 12, 4096, 4096}), "x [8, 12, 4096, 4096]");
  EXPECT_EQ(text_of({50257, 12288}), "x [50257, 12288]");
  EXPECT_EQ(text_of(Sizes(13, 1)), "x [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]");
}

TEST(PackedShape, OneDimensionIsTheNumberOfElements) {
  EXPECT_EQ(text_of({6}), "x 6");
  EXPECT_EQ(PackedShape(Sizes{6}), PackedShape());
  EXPECT_EQ(PackedShape().bits(), 0u);
}

TEST(PackedShape, BitsLieWhereTheHeaderSays) {
  // The 9 is stored in two groups: its low 3 bits (1) with the "more" bit above them, and then 1.
  EXPECT_EQ(PackedShape(Sizes{2, 9}).bits(), 0x1923u);
  EXPECT_EQ(PackedShape(Sizes{}).bits(), 0x1u);
}

TEST(PackedShape, WhatDoesNotFitHasADigestThatTellsShapesApart) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const std::vector<Sizes> large = {Sizes(14, 1),
                                    Sizes(15, 1),
                                    Sizes(100, 2),
                                    {1 << 20, 1 << 20, 1 << 20},
                                    {kMax, 1},
                                    {1, kMax},
                                    {1 << 20, 1, 1 << 20, 1, 1 << 20}};
  for (const Sizes& a : large) {
    EXPECT_TRUE(text_of(a).starts_with("x 6, shape #")) << text_of(a);
    for (const Sizes& b : large) EXPECT_EQ(PackedShape(a) == PackedShape(b), a == b);
  }
}

TEST(PackedShape, RandomShapesAreTheSameExactlyWhenTheirSizesAre) {
  Random random(1);
  std::map<uint64_t, Sizes> seen;
  for (int i = 0; i < 100000; ++i) {
    Sizes sizes(random.below(6));
    for (int64_t& size : sizes)
      size = static_cast<int64_t>(random.below(uint64_t{1} << random.below(20)));
    if (sizes.size() == 1) continue;
    const PackedShape shape(sizes);
    EXPECT_EQ(seen.try_emplace(shape.bits(), sizes).first->second, sizes);
    EXPECT_EQ(PackedShape::from_bits(shape.bits()), shape);
  }
}

TEST(PackedShape, AnyBitsReadAsSomething) {
  Random random(2);
  for (int i = 0; i < 100000; ++i) {
    const std::string text = PackedShape::from_bits(random.next()).to_string(6);
    EXPECT_TRUE(text.starts_with("x ")) << text;
    EXPECT_LT(text.size(), 200u) << text;
  }
}

}  // namespace
}  // namespace cadre
