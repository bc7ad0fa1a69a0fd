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

}  // namespace cadre::testing
