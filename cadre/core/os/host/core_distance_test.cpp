#include "cadre/core/os/host/core_distance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>

namespace cadre::os {
namespace {

TEST(CoreDistance, TheMaskNamesTheCores) {
  EXPECT_EQ(cores_of_mask(""), std::vector<int>());
  EXPECT_EQ(cores_of_mask(std::string("\x05\x00\x81", 3)), (std::vector<int>{0, 2, 16, 23}));
}

TEST(CoreDistance, FewCoresAreAllPairedAndManyByPowersOfTwo) {
  EXPECT_TRUE(core_pairs({}).empty());
  EXPECT_TRUE(core_pairs({3}).empty());
  EXPECT_EQ(core_pairs({1, 4, 6}), (std::vector<std::pair<int, int>>{{1, 4}, {1, 6}, {4, 6}}));
  std::vector<int> cores(16);
  std::iota(cores.begin(), cores.end(), 0);
  auto pairs = core_pairs(cores);
  EXPECT_EQ(pairs.size(), 15U + 14 + 12 + 8);
  EXPECT_EQ(pairs[3], std::make_pair(0, 8));
  for (const size_t count : {64U, 128U, 1024U}) {
    cores.resize(count);
    std::iota(cores.begin(), cores.end(), 0);
    pairs = core_pairs(cores);
    EXPECT_GT(pairs.size(), 100U) << count;
    EXPECT_LE(pairs.size(), 256U) << count;
  }
}

TEST(CoreDistance, MeasuresTheCoresOfThisProcess) {
  const auto system = make_native_system();
  const auto pairs = core_pairs(cores_of_mask(system->host().core_mask));
  const auto begin = system->now();
  const auto distances =
      measure_core_distances(*system, pairs, system->deadline_in(std::chrono::seconds(2)));
  EXPECT_LT(system->now() - begin, std::chrono::seconds(20));
  EXPECT_LE(distances.size(), pairs.size());
  for (const CoreDistance& distance : distances) {
    EXPECT_GT(distance.one_way, Duration(0));
    EXPECT_NE(distance.first, distance.second);
  }
}

TEST(CoreDistance, ACoreThatIsMissingIsLeftOut) {
  const auto system = make_native_system();
  constexpr int kNoSuchCore = 1023;
  const int own = cores_of_mask(system->host().core_mask).front();
  EXPECT_TRUE(measure_core_distances(*system, {{own, kNoSuchCore}, {kNoSuchCore, own}},
                                     system->deadline_in(std::chrono::seconds(5)))
                  .empty());
}

}  // namespace
}  // namespace cadre::os
