// Runs one test of this test program in a separate process with a given environment.
//
// Blocking: until the test ends, 60 s at most. Errors: as text in the result.
#pragma once

#include <string>
#include <vector>

namespace cadre::testing {

// Runs the test `name` ("Suite.DISABLED_Test"). Its environment has only the variables in
// `environment`, each as "NAME=value". Returns an empty text if the test passed, else how it ended.
std::string run_disabled_test(const std::string& name, const std::vector<std::string>& environment);

}  // namespace cadre::testing
