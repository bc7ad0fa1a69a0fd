// A real group whose collectives a test counts, drops, changes, delays or fails on their way to the
// engine. It keeps its own engine, and with it the memory that its ranks share.
//
// Threads, blocking: intercept() as a constructor of the group. Lifetime: the group shares `calls`.
// Errors: those of the engine and of FakeCalls. For tests only.
#pragma once

#include <memory>

#include "cadre/core/comm/communicator.h"
#include "cadre/testing/core/fake_backend.h"

namespace cadre::testing {

// REQUIRES: no operation was issued in the group. An allocation of symmetric memory is seen as the
// barrier or the all_gather that it makes.
void intercept(Communicator& group, std::shared_ptr<FakeCalls> calls);

}  // namespace cadre::testing
