// The paths of the source tree and of the build folder, for tests that read documents or start
// programs.
//
// Only paths.cpp is compiled with these folders as macros. So a compiler cache can reuse all other
// objects of the tests in a checkout at another path.
#pragma once

#include <string>
#include <string_view>

namespace cadre::testing {

// Returns the path of `relative` inside the source tree, for example
// source_path("docs/formats/layout.md").
std::string source_path(std::string_view relative);

// Returns the path of `relative` inside the build folder, for example build_path("bin/cadre").
std::string build_path(std::string_view relative);

}  // namespace cadre::testing
