// The seeds of randomized tests, and which subset of large tables of cases a run tests.
#pragma once

#include <cstdint>
#include <vector>

namespace cadre::testing {

// Returns 1, 2, ... count. If the environment variable CADRE_TEST_SEED is set, returns only this
// seed, to replay a failure (each randomized test prints its seed if it fails).
std::vector<uint64_t> test_seeds(int count);

// Returns test_seeds(200) for runs of the simulator. CADRE_SIM_SEEDS sets another count.
std::vector<uint64_t> simulator_seeds();
// Returns the largest number of ranks in a simulated run: the environment variable
// CADRE_SIM_MAX_RANKS, which must be at least 2; by default 4.
int max_simulated_ranks();

// Returns the seed by which tests with too many cases select the cases of this run: the environment
// variable CADRE_CASES_SEED; by default 1. .ci/run derives it from the commit and prints it.
uint64_t cases_seed();

// Returns n if each run tests one in n cases: the environment variable CADRE_CASES_ONE_IN, which
// must be at least 1; by default 1, so that all cases run.
uint64_t cases_one_in();

// Returns every n-th case, where n is cases_one_in(). cases_seed() selects with which case it
// begins. Not to be called for a table that may be shorter than n: some runs would test none of it.
template <typename Case>
std::vector<Case> share_of(const std::vector<Case>& cases) {
  std::vector<Case> share;
  for (size_t i = cases_seed() % cases_one_in(); i < cases.size(); i += cases_one_in()) {
    share.push_back(cases[i]);
  }
  return share;
}

// Returns every n-th case, and at least one. `offset` is added to cases_seed(): a test with several
// parameters gives each of them another offset, so that every run has each case in one of them.
template <typename Case>
std::vector<Case> share_of(const std::vector<Case>& cases, uint64_t offset) {
  std::vector<Case> share;
  const uint64_t begin = (cases_seed() + offset) % cases_one_in();
  for (size_t i = begin; i < cases.size(); i += cases_one_in()) share.push_back(cases[i]);
  if (share.empty() && !cases.empty()) share.push_back(cases[begin % cases.size()]);
  return share;
}

}  // namespace cadre::testing
