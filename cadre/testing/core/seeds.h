// Returns the seeds of randomised tests.
//
// Threads: any. Blocking: never.
#pragma once

#include <cstdint>
#include <vector>

namespace cadre::testing {

// Returns 1, 2, ... count; or only the seed in the environment variable CADRE_TEST_SEED, to replay
// a failure (each such test names its seed if it fails).
std::vector<uint64_t> test_seeds(int count);

// Returns test_seeds(200) for runs of the simulator; CADRE_SIM_SEEDS sets another count.
std::vector<uint64_t> simulator_seeds();
// Returns the largest number of ranks in a simulated run: CADRE_SIM_MAX_RANKS, which must be at
// least 2; by default 4.
int max_simulated_ranks();

// Returns the seed by which a test with too many cases picks those of this run: the environment
// variable CADRE_CASES_SEED, or 1. .ci/run derives it from the commit and prints it.
uint64_t cases_seed();

// Returns n if one in n cases runs: the environment variable CADRE_CASES_ONE_IN, which must be at
// least 1; by default 1, with which all cases run.
uint64_t cases_one_in();

// Returns one in cases_one_in() of `cases`, which cases_seed() picks.
template <typename Case>
std::vector<Case> share_of(const std::vector<Case>& cases) {
  std::vector<Case> share;
  for (size_t i = cases_seed() % cases_one_in(); i < cases.size(); i += cases_one_in()) {
    share.push_back(cases[i]);
  }
  return share;
}

}  // namespace cadre::testing
