// Counts what a process holds, so that a test can show that nothing was left behind.
//
// Threads: any. Blocking: leftovers_since() for at most half a second, because the kernel takes a
// moment to remove a thread that was joined.
#pragma once

#include <cstdint>
#include <string>

namespace cadre::testing {

struct Resources {
  int num_fds = 0;
  int num_threads = 0;
  int num_children = 0;  // zombies too
  int num_segments = 0;  // mappings of shared segments
};

Resources count_resources();

// "2 more descriptors, 1 more thread than before"; empty when nothing was left.
std::string leftovers_since(const Resources& before);

// What the kernel has allocated for the shared segments that this process has open, whichever
// process touched it.
int64_t committed_shared_bytes();

}  // namespace cadre::testing
