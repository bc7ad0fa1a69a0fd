// Ends a compilation that is not C++20, with one sentence. Every installed header includes it
// first: cmake/CadreInstall.cmake puts that line into what it installs.
#pragma once

#if __cplusplus < 202002L
#error "Cadre's headers are C++20: compile with -std=c++20 (in CMake: set(CMAKE_CXX_STANDARD 20))"
// A compiler goes on behind #error, but not behind a file that is not there.
#include "the compilation ends here"
#endif
