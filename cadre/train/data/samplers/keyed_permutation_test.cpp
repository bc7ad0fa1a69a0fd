#include "cadre/train/data/samplers/keyed_permutation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "cadre/core/base/error.h"

namespace cadre {
namespace {

std::vector<int64_t> images_of(int64_t size, uint64_t key) {
  const KeyedPermutation permutation(size, key);
  std::vector<int64_t> images;
  for (int64_t i = 0; i < size; ++i) images.push_back(permutation(i));
  return images;
}

TEST(KeyedPermutation, ReachesEachNumberOnce) {
  for (int64_t size = 0; size < 300; ++size) {
    std::vector<int64_t> images = images_of(size, 7 + static_cast<uint64_t>(size));
    std::ranges::sort(images);
    for (int64_t i = 0; i < size; ++i) ASSERT_EQ(images[static_cast<size_t>(i)], i) << size;
  }
  std::vector<int64_t> large = images_of(1000003, 1);
  std::ranges::sort(large);
  EXPECT_EQ(std::ranges::adjacent_find(large), large.end());
  EXPECT_EQ(large.front(), 0);
  EXPECT_EQ(large.back(), 1000002);
}

TEST(KeyedPermutation, HugeSizesNeedNoMemory) {
  for (const int64_t size : {int64_t{1} << 40, std::numeric_limits<int64_t>::max()}) {
    const KeyedPermutation permutation(size, 3);
    std::set<int64_t> images;
    for (int64_t i = 0; i < 10000; ++i) {
      const int64_t image = permutation(i);
      ASSERT_GE(image, 0);
      ASSERT_LT(image, size);
      images.insert(image);
    }
    EXPECT_EQ(images.size(), 10000);
    // The images of the first 10000 numbers are in all parts of the range.
    EXPECT_LT(*images.begin(), size / 1000);
    EXPECT_GT(*images.rbegin(), size - size / 1000);
  }
}

TEST(KeyedPermutation, DependsOnTheKeyAlone) {
  EXPECT_EQ(images_of(1000, 5), images_of(1000, 5));
  EXPECT_NE(images_of(1000, 5), images_of(1000, 6));
  EXPECT_THROW(KeyedPermutation(-1, 0), Error);
  // A change of these values would change the order of runs that are resumed.
  EXPECT_EQ(images_of(10, 1), (std::vector<int64_t>{6, 1, 9, 5, 7, 3, 2, 0, 8, 4}));
}

// Each index has each image equally often over many keys: chi-squared with 12 * 12 cells.
TEST(KeyedPermutation, ImagesAreUniform) {
  constexpr size_t kSize = 12;
  constexpr int kNumKeys = 12000;
  std::vector<int> counts(kSize * kSize);
  for (int key = 0; key < kNumKeys; ++key) {
    const std::vector<int64_t> images = images_of(kSize, static_cast<uint64_t>(key));
    for (size_t i = 0; i < kSize; ++i) ++counts[i * kSize + static_cast<size_t>(images[i])];
  }
  const double expected = kNumKeys / static_cast<double>(kSize);
  double chi_squared = 0;
  for (const int count : counts) chi_squared += std::pow(count - expected, 2) / expected;
  // 121 degrees of freedom: the mean is 121, and values above 200 have a probability below 1e-5.
  EXPECT_LT(chi_squared, 200);
  // All orders of four numbers occur, about equally often.
  std::vector<int> orders(4 * 4 * 4);
  for (int key = 0; key < 2400; ++key) {
    const std::vector<int64_t> images = images_of(4, static_cast<uint64_t>(key));
    ++orders[static_cast<size_t>(images[0] * 16 + images[1] * 4 + images[2])];
  }
  EXPECT_EQ(std::ranges::count_if(orders, [](int count) { return count > 0; }), 24);
  EXPECT_LT(std::ranges::max(orders), 160);  // 100 are expected
}

}  // namespace
}  // namespace cadre
