// The seeds that a randomised test runs with.
//
// Threads: any. Blocking: never.
#pragma once

#include <cstdint>
#include <vector>

namespace cadre::testing {

// 1, 2, ... count; or the one seed in the environment variable CADRE_TEST_SEED, to replay a failure
// (each such test names its seed when it fails).
std::vector<uint64_t> test_seeds(int count);

// test_seeds() of 200, or of as many as CADRE_SIM_SEEDS says: for runs of the simulator.
std::vector<uint64_t> simulator_seeds();
// The most ranks of such a run: CADRE_SIM_MAX_RANKS, at least 2; default 4.
int max_simulated_ranks();

// What picks the share of the cases of this run where a test has too many for every run: the
// environment variable CADRE_CASES_SEED, or 1. .ci/run derives it from the commit and prints it.
uint64_t cases_seed();

// The environment variable CADRE_CASES_ONE_IN, at least 1; default 1, which is all cases.
uint64_t cases_one_in();

// One in cases_one_in() of `cases`, as cases_seed() picks them.
template <typename Case>
std::vector<Case> share_of(const std::vector<Case>& cases) {
  std::vector<Case> share;
  for (size_t i = cases_seed() % cases_one_in(); i < cases.size(); i += cases_one_in()) {
    share.push_back(cases[i]);
  }
  return share;
}

}  // namespace cadre::testing
