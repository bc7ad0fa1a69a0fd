// Stops the compilation with one sentence if it is not C++20. Every installed header includes this
// file first: cmake/CadreInstall.cmake adds the line at installation.
#pragma once

#if __cplusplus < 202002L
#error "Cadre's headers are C++20: compile with -std=c++20 (in CMake: set(CMAKE_CXX_STANDARD 20))"
// A compiler continues after #error, so the #include of a file that does not exist stops it.
#include "the compilation ends here"
#endif
