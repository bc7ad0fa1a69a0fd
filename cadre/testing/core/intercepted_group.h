// Changes a real group so that a test can count, drop, change, delay or fail its collectives on
// their way to the engine. The group keeps its own engine and the memory that its ranks share.
//
// Threads, blocking: call intercept() like a constructor of the group. Lifetime: the group shares
// `calls`. Errors: those of the engine and of FakeCalls. For tests only.
#pragma once

#include <memory>

#include "cadre/core/comm/communicator.h"
#include "cadre/testing/core/fake_backend.h"

namespace cadre::testing {

// REQUIRES: no operation was issued in the group. The calls contain an allocation of symmetric
// memory as the barrier or the all_gather that it makes.
void intercept(Communicator& group, std::shared_ptr<FakeCalls> calls);

}  // namespace cadre::testing
