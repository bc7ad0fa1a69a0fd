// Runs the collectives of a simulated job, and checks each result against its formula.
//
// Threads: see Communicator. Blocking: until the collective is done or fails. Errors: what the
// Communicator throws; kInternal for a wrong result.
#pragma once

#include <cstddef>

#include "cadre/core/comm/communicator.h"
#include "step.h"

namespace cadre::testing {

inline constexpr size_t kMaxStepCount = 3000;  // the largest Step::count

// Returns the bytes of symmetric memory that run_collective() needs.
size_t symmetric_bytes(int world_size);

// Runs the collective as rank group.rank(). The kinds kMessages and kTwoGroups are not supported.
void run_collective(Communicator& group, const Step& step, Bytes symmetric);

}  // namespace cadre::testing
