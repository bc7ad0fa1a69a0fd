// Converts exceptions of a user's module or function to an Error.
//
// Threads: one. Blocking: as `run`. Errors: none; an error of another type is kInvalidArgument.
#pragma once

#include <functional>

#include "cadre/base/error.h"

namespace cadre::verify {

Status as_status(const std::function<void()>& run);

}  // namespace cadre::verify
