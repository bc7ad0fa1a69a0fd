// Counts the resources of a process, so that a test can show that it leaks none.
//
// Threads: any. Blocking: leftovers_since() for at most half a second, because the kernel needs a
// moment to remove a thread that was joined.
#pragma once

#include <cstdint>
#include <string>

namespace cadre::testing {

struct Resources {
  int num_fds = 0;
  int num_threads = 0;
  int num_children = 0;  // includes zombies
  int num_segments = 0;  // mappings of shared segments
};

Resources count_resources();

// Returns the resources that the process has in addition to `before`, such as "2 more descriptors;
// 1 more threads; "; an empty text if there are none.
std::string leftovers_since(const Resources& before);

// Returns how many bytes the kernel has allocated for the shared segments that this process has
// open, including bytes that other processes have written.
int64_t committed_shared_bytes();

}  // namespace cadre::testing
