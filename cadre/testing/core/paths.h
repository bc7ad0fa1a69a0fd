// Paths of the source tree and of the build folder, for tests that read documents or start
// programs.
//
// Only paths.cpp is compiled with these folders on its command line, so that a compiler cache finds
// every other object of the tests again when the checkout lies elsewhere.
#pragma once

#include <string>
#include <string_view>

namespace cadre::testing {

// `relative` below the root of the source tree, for example source_path("docs/formats/layout.md").
std::string source_path(std::string_view relative);

// `relative` below the build folder, for example build_path("bin/cadre").
std::string build_path(std::string_view relative);

}  // namespace cadre::testing
