// Creates Works (handles of asynchronous operations) that add a step to one operation of a
// Communicator, or combine several.
//
// Threads, blocking, lifetime, errors: as Work.
#pragma once

#include <functional>
#include <vector>

#include "cadre/core/comm/queue/work.h"

namespace cadre {

// Returns a work that ends with the operation. The first wait() on it that succeeds calls `finish`
// before it returns.
Work finish_after(Work operation, std::function<void()> finish);

// Returns a work that ends when all `works` have ended. It fails with the first error in the order
// of the list.
Work all_of(std::vector<Work> works);

}  // namespace cadre
