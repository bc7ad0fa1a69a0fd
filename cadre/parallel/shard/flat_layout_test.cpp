// Compares the offsets of flat layouts with offsets that are found by counting elements one by one,
// and the boxes of a range with the elements of that range.
#include "cadre/parallel/shard/flat_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <random>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/shard/division/boxes.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"

namespace cadre {
namespace {

using ::testing::ElementsAre;
using testing::failure_of;
using ::testing::HasSubstr;
using torch::Tensor;

// The test counts the elements of the flat buffer one by one, and so finds each element's shard and
// index in the shard.
TEST(FlatLayout, RangesAreWhereCountingPutsTheElements) {
  for (const uint64_t seed : testing::test_seeds(300)) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::vector<int64_t> numels(1 + random() % 6);
    for (int64_t& numel : numels) numel = static_cast<int64_t>(random() % 40);
    const int num_shards = 1 + static_cast<int>(random() % 9);
    const int64_t alignment = 1 + static_cast<int64_t>(random() % 16);
    const int64_t of_tensors = 1 + static_cast<int64_t>(random() % 16);
    const shard::FlatLayout layout(numels, num_shards,
                                   {.of_shards = alignment, .of_tensors = of_tensors});
    ASSERT_EQ(layout.shard_numel() % alignment, 0);
    ASSERT_EQ(layout.numel(), layout.shard_numel() * num_shards);
    int64_t place = 0;
    int64_t end = 0;
    for (size_t i = 0; i < numels.size(); ++i) {
      while (place % of_tensors != 0) ++place;
      ASSERT_EQ(layout.offset(i), place);
      for (int64_t element = 0; element < numels[i]; ++element, ++place) {
        for (int shard = 0; shard < num_shards; ++shard) {
          const FlatRange range = layout.range(i, shard);
          const bool holds = element >= range.begin && element < range.end;
          ASSERT_EQ(holds, place / layout.shard_numel() == shard);
          if (!holds) continue;
          ASSERT_EQ(layout.offset_in_shard(i, shard) + element - range.begin,
                    place % layout.shard_numel());
        }
      }
      if (numels[i] == 0) place = end;
      end = place;
      for (int shard = 0; shard < num_shards; ++shard) {
        const FlatRange range = layout.range(i, shard);
        ASSERT_LE(range.begin, range.end);
        ASSERT_LE(layout.offset_in_shard(i, shard) + range.size(), layout.shard_numel());
      }
    }
    ASSERT_LE(place, layout.numel());
    // The shards are not longer than necessary: with `alignment` fewer elements each, they could
    // not hold all tensors.
    ASSERT_LT((layout.shard_numel() - alignment) * num_shards, std::max<int64_t>(place, 1));
  }
}

TEST(FlatLayout, OfNothingIsEmpty) {
  const shard::FlatLayout layout({0, 0}, 3, {16});
  EXPECT_EQ(layout.numel(), 0);
  EXPECT_EQ(layout.range(1, 2), FlatRange{});
  EXPECT_EQ(shard::FlatLayout({}, 2, {}).numel(), 0);
  EXPECT_EQ(layout, shard::FlatLayout({0, 0}, 3, {16}));
  EXPECT_FALSE(layout == shard::FlatLayout({0, 1}, 3, {16}));
}

TEST(FlatLayout, RefusesWhatIsNoLayout) {
  EXPECT_THAT(failure_of([] { shard::FlatLayout({1}, 0, {}); }), HasSubstr("0 shards"));
  EXPECT_THAT(failure_of([] { shard::FlatLayout({1}, 1, {0}); }), HasSubstr("alignment of 0"));
  EXPECT_THAT(failure_of([] { shard::FlatLayout({1, -2}, 1, {}); }), HasSubstr("tensor 1 has -2"));
}

// A tensor of 3 floats on two ranks gives shards of 2 elements (8 bytes), or of 1,024 elements
// (4,096 bytes) if shards are whole pages. The lists are the sizes in bytes of whole, part, shard,
// sent and gathered.
TEST(FlatMemory, HasTheBuffersOfItsForm) {
  const auto sizes_of_buffers = [](shard::FlatMemory::Options options, int num_shards,
                                   bool is_mapped = false) {
    options.alignment = 2;
    shard::FlatMemory memory({3}, num_shards, options);
    if (is_mapped) memory.set_mapped();
    const auto [whole, part, shard, sent, gathered] = memory.buffers();
    std::vector<int64_t> sizes;
    for (const auto& buffer : {whole, part, shard, sent, gathered}) {
      sizes.push_back(buffer ? buffer->num_bytes() : 0);
    }
    return sizes;
  };
  EXPECT_THAT(sizes_of_buffers({}, 2), ElementsAre(0, 0, 8, 0, 16));
  EXPECT_THAT(sizes_of_buffers({}, 1), ElementsAre(16, 0, 0, 0, 0))
      << "the whole buffer is the shard";
  EXPECT_THAT(sizes_of_buffers({.keep_full = true}, 2), ElementsAre(16, 0, 0, 0, 0));
  EXPECT_THAT(sizes_of_buffers({.is_in_files = true}, 1), ElementsAre(0, 0, 16, 0, 16));
  const shard::FlatMemory::Options mapped = {.form = ShardForm::kMapped};
  EXPECT_THAT(sizes_of_buffers(mapped, 2, /*is_mapped=*/true), ElementsAre(0, 4096, 0, 0, 0));
  EXPECT_THAT(sizes_of_buffers(mapped, 2), ElementsAre(0, 0, 4096, 0, 8192)) << "across hosts";
  // A bfloat16 element has half the bytes, so a page has 2,048 elements.
  const auto kHalf = at::kBFloat16;
  EXPECT_THAT(sizes_of_buffers({.compute_dtype = kHalf}, 2), ElementsAre(0, 0, 8, 4, 8));
  EXPECT_THAT(sizes_of_buffers({.compute_dtype = kHalf, .keep_full = true}, 2),
              ElementsAre(8, 0, 8, 4, 0));
  EXPECT_THAT(sizes_of_buffers({.compute_dtype = kHalf, .is_in_files = true}, 2),
              ElementsAre(0, 0, 8, 0, 8));
  EXPECT_THAT(sizes_of_buffers({.form = ShardForm::kMapped, .compute_dtype = kHalf}, 2, true),
              ElementsAre(0, 4096, 8192, 0, 0));
}

Tensor cut_out(const Tensor& whole, const Box& box) {
  Tensor part = whole;
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    part = part.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
  }
  return part;
}

TEST(BoxesOfRange, CutOutTheElementsOfTheRange) {
  for (const uint64_t seed : testing::test_seeds(2000)) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const size_t num_dims = random() % 5;
    Box box;
    std::vector<int64_t> whole_sizes;
    for (size_t dim = 0; dim < num_dims; ++dim) {
      box.offsets.push_back(static_cast<int64_t>(random() % 3));
      box.sizes.push_back(1 + static_cast<int64_t>(random() % 4));
      whole_sizes.push_back(box.offsets[dim] + box.sizes[dim] + static_cast<int64_t>(random() % 2));
    }
    Tensor whole = torch::arange(torch::empty(whole_sizes).numel()).view(whole_sizes);
    const Tensor flat = cut_out(whole, box).flatten();
    FlatRange range;
    range.begin = static_cast<int64_t>(random() % static_cast<uint64_t>(flat.numel() + 1));
    range.end = range.begin + static_cast<int64_t>(
                                  random() % static_cast<uint64_t>(flat.numel() - range.begin + 1));
    const std::vector<Box> boxes = shard::boxes_of_range(box, range);
    std::vector<Tensor> parts = {torch::empty({0}, torch::kLong)};
    for (const Box& part : boxes) {
      ASSERT_GT(part.numel(), 0);
      parts.push_back(cut_out(whole, part).flatten());
    }
    ASSERT_TRUE(torch::equal(torch::cat(parts), flat.narrow(0, range.begin, range.size())));
    ASSERT_LE(boxes.size(), num_dims == 0 ? 1 : 2 * num_dims - 1);
    // A range that covers the whole box gives just this box.
    if (num_dims > 0 && range.begin == 0 && range.size() == flat.numel() && flat.numel() > 0) {
      ASSERT_THAT(boxes, ElementsAre(box));
    }
  }
}

TEST(BoxesOfRange, OfNothingAndOfANumber) {
  EXPECT_TRUE(shard::boxes_of_range({{0, 0}, {0, 3}}, {}).empty());
  EXPECT_TRUE(shard::boxes_of_range({{0}, {3}}, {2, 2}).empty());
  EXPECT_THAT(shard::boxes_of_range({{}, {}}, {0, 1}), ElementsAre(Box{}));
  EXPECT_THAT(failure_of([] {
                shard::boxes_of_range({{0}, {3}}, {1, 4});
              }),
              HasSubstr("elements [1, 4) are no range of a box of 3 elements"));
}

// The box is rows 2 and 3 of a (4, 2, 3) tensor. The range covers its 12 elements except the first
// and the last one.
TEST(BoxesOfRange, AreAsFewAsTheyCanBe) {
  EXPECT_THAT(shard::boxes_of_range({{2, 0, 0}, {2, 2, 3}}, {1, 11}),
              ElementsAre(Box{{2, 0, 1}, {1, 1, 2}}, Box{{2, 1, 0}, {1, 1, 3}},
                          Box{{3, 0, 0}, {1, 1, 3}}, Box{{3, 1, 0}, {1, 1, 2}}));
  EXPECT_THAT(shard::boxes_of_range({{0, 0}, {9, 4}}, {6, 30}),
              ElementsAre(Box{{1, 2}, {1, 2}}, Box{{2, 0}, {5, 4}}, Box{{7, 0}, {1, 2}}));
}

}  // namespace
}  // namespace cadre
