// Converts the exception that a catch block has caught, whatever its type, to a cadre::Error.
//
// Threads: any; call only inside a catch block. Lifetime: the result is a value.
#pragma once

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre {

// Returns a caught cadre::Error unchanged. std::bad_alloc becomes kUnavailable. Everything else
// becomes kInvalidArgument, because it comes from the program's code or from an argument for which
// libtorch throws: c10::Error with its message without the backtrace, other exceptions with what(),
// and a thrown value that is no std::exception with a fixed sentence.
CADRE_EXPORT Error caught_error();

}  // namespace cadre
