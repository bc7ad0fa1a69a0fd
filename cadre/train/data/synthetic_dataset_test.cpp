// Tests that a generated sample depends only on the seed and its index.
#include "cadre/train/data/synthetic_dataset.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace cadre {
namespace {

using Indices = std::vector<int64_t>;

TEST(SyntheticRegression, IsAFunctionOfSeedAndIndex) {
  const SyntheticRegression a({.num_samples = 16, .num_inputs = 3, .seed = 7});
  const SyntheticRegression b({.num_samples = 16, .num_inputs = 3, .seed = 7});
  const Batch all = a.get(Indices{3, 5});
  EXPECT_TRUE(all.data.equal(b.get(Indices{3, 5}).data));
  EXPECT_TRUE(all.target[1].equal(b.get(Indices{5}).target[0]));
  EXPECT_FALSE(all.data[0].equal(all.data[1]));
  const SyntheticRegression other({.num_samples = 16, .num_inputs = 3, .seed = 8});
  EXPECT_FALSE(all.data.equal(other.get(Indices{3, 5}).data));
  EXPECT_EQ(all.data.sizes(), (at::IntArrayRef{2, 3}));
  EXPECT_EQ(all.target.sizes(), (at::IntArrayRef{2, 1}));
}

TEST(SyntheticImages, AreAFunctionOfTheSeed) {
  const SyntheticImagesOptions options = {.num_samples = 40, .num_classes = 4, .size = 6};
  const SyntheticImages a(options);
  const SyntheticImages b(options);
  const Batch all = a.get(Indices{3, 35});
  EXPECT_TRUE(all.data.equal(b.get(Indices{3, 35}).data));
  EXPECT_TRUE(all.data[1].equal(b.slice(30, 40).get(Indices{5}).data[0]));
  SyntheticImagesOptions with_other_seed = options;
  with_other_seed.seed = options.seed + 1;
  const SyntheticImages other(with_other_seed);
  EXPECT_FALSE(all.data.equal(other.get(Indices{3, 35}).data));
  EXPECT_FALSE(all.data[0].equal(all.data[1]));
  EXPECT_EQ(all.data.sizes(), (at::IntArrayRef{2, 1, 6, 6}));
  EXPECT_LT(all.target.max().item<int64_t>(), 4);
}

}  // namespace
}  // namespace cadre
