// Paths of the source tree and of the build folder, for tests that read documents or start
// programs.
//
// Only paths.cpp is compiled with these folders on its command line. So a compiler cache can reuse
// every other object of the tests if the checkout lies elsewhere.
#pragma once

#include <string>
#include <string_view>

namespace cadre::testing {

// Returns the path of `relative` below the root of the source tree, for example
// source_path("docs/formats/layout.md").
std::string source_path(std::string_view relative);

// Returns the path of `relative` below the build folder, for example build_path("bin/cadre").
std::string build_path(std::string_view relative);

}  // namespace cadre::testing
