// Inserts a fake engine in front of a real group's engine, so that a test can count, drop, change,
// delay or fail collectives before the engine gets them. The group keeps its engine and the memory
// that its ranks share.
//
// Threads, blocking: call intercept() on all ranks, as a constructor of the group. Lifetime: the
// group shares `calls`. Errors: those of the engine and of FakeCalls. For tests only.
#pragma once

#include <memory>

#include "cadre/core/comm/communicator.h"
#include "cadre/testing/core/fake_backend.h"

namespace cadre::testing {

// REQUIRES: no operation was issued in the group. `calls` also gets the barrier or all_gather that
// an allocation of symmetric memory runs.
void intercept(Communicator& group, std::shared_ptr<FakeCalls> calls);

}  // namespace cadre::testing
