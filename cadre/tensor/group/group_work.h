// Works of a group that represent more than one operation of its Communicator.
//
// Threads, blocking, lifetime, errors: as Work.
#pragma once

#include <functional>
#include <vector>

#include "cadre/core/comm/queue/work.h"

namespace cadre {

// Returns a work that ends with the operation. The first wait() that sees it succeed calls `finish`
// before it returns.
Work finish_after(Work operation, std::function<void()> finish);

// Returns a work that ends when all have ended. It fails with the first error in the order of the
// list.
Work all_of(std::vector<Work> works);

}  // namespace cadre
