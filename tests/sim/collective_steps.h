// The collectives of a simulated job, each result checked against its formula.
//
// Threads: as Communicator. Blocking: until the collective is done or fails.
// Errors: what the Communicator throws; kInternal for a wrong result.
#pragma once

#include <cstddef>

#include "cadre/core/comm/communicator.h"
#include "step.h"

namespace cadre::testing {

inline constexpr size_t kMaxStepCount = 3000;  // Step::count

// What run_collective() needs of symmetric memory.
size_t symmetric_bytes(int world_size);

// The part of group.rank(). Not for kMessages and kTwoGroups.
void run_collective(Communicator& group, const Step& step, Bytes symmetric);

}  // namespace cadre::testing
