// A library with NCCL's functions for tests: its ranks are threads of this process, its streams
// those of the late device (late_device/). It computes late, in the streams, checks how it is
// called, and fails as the test says.
//
// The library is a file, libcadre_fake_nccl.so, which the engine loads by its path as it loads
// NCCL. Its communicators are nonblocking only.
// Threads: any. Lifetime: the library stays loaded until the process ends. Errors: CheckFailed if
// the library is missing. For tests only.
#pragma once

#include <cstdint>
#include <string>

namespace cadre::testing::fake_nccl {

// Faults are those of one rank of every communicator that is made afterwards; -1 is no rank.
struct Faults {
  int init_fails_on = -1;        // its initialisation reports a system error
  int call_fails_on = -1;        // its first group reports an internal error, later
  int call_hangs_on = -1;        // its first group is never run, and nothing is reported
  int call_is_refused_on = -1;   // each of its calls returns an error
  int group_is_refused_on = -1;  // the end of its first group returns an error
  int state_throws_on = -1;      // ncclCommGetAsyncError throws 30 ms after its first group
  // ncclCommAbort and ncclCommDestroy do not return before other faults are set.
  int end_hangs_on = -1;
  // The initialisation succeeds without the other ranks, and no collective ends. So the ranks may
  // be processes.
  bool is_alone = false;
  // How long every initialisation and every group stay "in progress" before they have an effect.
  int64_t progress_us = 0;
};

struct Counts {
  uint64_t open_groups = 0;  // begun and not ended
  uint64_t groups = 0;       // calls of ncclGroupEnd that end a group
  uint64_t collectives = 0;
  uint64_t sends = 0;
  uint64_t recvs = 0;
  uint64_t operations = 0;     // made by ncclRedOpCreatePreMulSum and not destroyed
  uint64_t communicators = 0;  // made and not destroyed or aborted
  uint64_t aborts = 0;
  uint64_t misuses = 0;  // calls that NCCL does not allow
};

// Loads the library and connects it with the late device. Returns its path.
std::string load();
void set_faults(const Faults& faults);
Counts counts();
// Returns a sentence about the first misuse; empty if there was none.
std::string first_misuse();

}  // namespace cadre::testing::fake_nccl
