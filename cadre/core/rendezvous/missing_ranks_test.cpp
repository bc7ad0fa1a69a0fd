// Tests the search for missing ranks with every possible set of missing ranks.
#include "cadre/core/rendezvous/missing_ranks.h"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "cadre/core/store/hash_store.h"

namespace cadre {
namespace {

TEST(MissingRanks, EverySetOfMissingRanksIsFound) {
  constexpr int kNumRanks = 6;
  const auto system = os::make_native_system();
  const Deadline soon = system->deadline_in(std::chrono::seconds(20));
  std::vector<std::string> keys;
  for (int rank = 0; rank < kNumRanks; ++rank) keys.push_back("rank " + std::to_string(rank));
  for (int set = 0; set < 1 << kNumRanks; ++set) {
    HashStore store(*system);
    std::vector<int> expected;
    for (int rank = 0; rank < kNumRanks; ++rank) {
      if ((set >> rank & 1) != 0) {
        expected.push_back(rank);
      } else {
        store.set(keys[static_cast<size_t>(rank)], "", soon).value_or_throw();
      }
    }
    EXPECT_EQ(find_missing_ranks(store, keys, soon).value_or_throw(), expected) << set;
  }
}

TEST(MissingRanks, AreNamedUpToEight) {
  EXPECT_EQ(name_ranks({}), "one rank or more");
  EXPECT_EQ(name_ranks(std::vector<int>{3}), "rank 3");
  EXPECT_EQ(name_ranks(std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}),
            "rank 0, rank 1, rank 2, rank 3, rank 4, rank 5, rank 6, rank 7 and 2 more");
}

}  // namespace
}  // namespace cadre
