// Finds the ranks that have not written their keys into the store.
//
// Threads: one. Blocking: until the Deadline at most. Lifetime: borrows the store for the call.
// Errors: those of the store.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/store/store.h"

namespace cadre {

// Returns the ranks whose keys are not set, in ascending order. keys[r] is the key of rank r. A
// binary search makes few requests if few ranks are missing.
CADRE_EXPORT Result<std::vector<int>> find_missing_ranks(Store& store,
                                                         std::span<const std::string> keys,
                                                         Deadline deadline);

// Returns "rank 2, rank 5 and 3 more"; "one rank or more" if it is not known which.
CADRE_EXPORT std::string name_ranks(std::span<const int> ranks);

}  // namespace cadre
