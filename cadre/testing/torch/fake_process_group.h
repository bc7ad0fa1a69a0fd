// A ProcessGroup of any size in one process, without other ranks, for dry runs.
// cadre/testing/core/fake_group.h describes the results of its collectives.
//
// Threads, blocking, lifetime and errors: those of ProcessGroup.
#pragma once

#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/fake_group.h"

namespace cadre::testing {

// Source: init_process_group(backend="fake") of PyTorch.
inline ProcessGroup make_fake_group(int world_size, const FakeGroupOptions& options = {}) {
  return ProcessGroup(make_fake_communicator(world_size, options));
}

}  // namespace cadre::testing
