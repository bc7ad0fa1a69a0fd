// The collectives of a simulated job. Each result is checked against its formula.
//
// Threads: those of Communicator. Blocking: until the collective is done or fails. Errors: what the
// Communicator throws; kInternal for a wrong result.
#pragma once

#include <cstddef>

#include "cadre/core/comm/communicator.h"
#include "step.h"

namespace cadre::testing {

inline constexpr size_t kMaxStepCount = 3000;  // limit of Step::count

// Returns how much symmetric memory run_collective() needs.
size_t symmetric_bytes(int world_size);

// Runs the part of group.rank(). Not for kMessages and kTwoGroups.
void run_collective(Communicator& group, const Step& step, Bytes symmetric);

}  // namespace cadre::testing
