#include "cadre/testing/seeds.h"

#include <cstdlib>
#include <numeric>
#include <string>

namespace cadre::testing {

std::vector<uint64_t> test_seeds(int count) {
  if (const char* seed = std::getenv("CADRE_TEST_SEED")) return {std::stoull(seed)};
  std::vector<uint64_t> seeds(static_cast<size_t>(count));
  std::iota(seeds.begin(), seeds.end(), 1);
  return seeds;
}

}  // namespace cadre::testing
