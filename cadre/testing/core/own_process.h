// Runs a test of the running program in a process of its own, which starts with a chosen
// environment.
//
// Threads: one. Blocking: until the test ends, 60 s at most. Errors: in the result.
#pragma once

#include <string>
#include <vector>

namespace cadre::testing {

// Runs the test called `name` ("Suite.DISABLED_Test"). Its environment has only the variables in
// `environment`, each "NAME=value". Returns an empty text if it passed; else how it ended.
std::string run_disabled_test(const std::string& name, const std::vector<std::string>& environment);

}  // namespace cadre::testing
