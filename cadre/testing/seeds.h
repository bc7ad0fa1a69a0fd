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

}  // namespace cadre::testing
