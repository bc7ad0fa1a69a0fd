// The seeds of randomised tests.
//
// Threads: any. Blocking: never.
#pragma once

#include <cstdint>
#include <vector>

namespace cadre::testing {

// Returns 1, 2, ... count; or only the seed in the environment variable CADRE_TEST_SEED, to replay
// a failure (each such test names its seed if it fails).
std::vector<uint64_t> test_seeds(int count);

// Returns test_seeds() of 200, or of CADRE_SIM_SEEDS if it is set, for runs of the simulator.
std::vector<uint64_t> simulator_seeds();
// Returns the largest number of ranks in such a run: CADRE_SIM_MAX_RANKS, at least 2; default 4.
int max_simulated_ranks();

// Returns the number that picks this run's share of the cases, if a test has too many for every
// run: the environment variable CADRE_CASES_SEED, or 1. .ci/run derives it from the commit and
// prints it.
uint64_t cases_seed();

// Returns the environment variable CADRE_CASES_ONE_IN, at least 1; default 1, with which all cases
// run.
uint64_t cases_one_in();

// Returns one in cases_one_in() of `cases`; cases_seed() picks them.
template <typename Case>
std::vector<Case> share_of(const std::vector<Case>& cases) {
  std::vector<Case> share;
  for (size_t i = cases_seed() % cases_one_in(); i < cases.size(); i += cases_one_in()) {
    share.push_back(cases[i]);
  }
  return share;
}

}  // namespace cadre::testing
