#include "cadre/testing/core/seeds.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string>

namespace cadre::testing {
namespace {

int number_in(const char* variable, int fallback) {
  const char* text = std::getenv(variable);
  return text == nullptr ? fallback : std::stoi(text);
}

}  // namespace

std::vector<uint64_t> test_seeds(int count) {
  if (const char* seed = std::getenv("CADRE_TEST_SEED")) return {std::stoull(seed)};
  std::vector<uint64_t> seeds(static_cast<size_t>(count));
  std::iota(seeds.begin(), seeds.end(), 1);
  return seeds;
}

std::vector<uint64_t> simulator_seeds() {
  return test_seeds(number_in("CADRE_SIM_SEEDS", 200));
}

int max_simulated_ranks() {
  return std::max(2, number_in("CADRE_SIM_MAX_RANKS", 4));
}

uint64_t cases_seed() {
  const char* seed = std::getenv("CADRE_CASES_SEED");
  return seed == nullptr ? 1 : std::stoull(seed);
}

uint64_t cases_one_in() {
  return static_cast<uint64_t>(std::max(1, number_in("CADRE_CASES_ONE_IN", 1)));
}

}  // namespace cadre::testing
