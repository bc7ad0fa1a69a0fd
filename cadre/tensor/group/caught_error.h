// The exception that a catch block has caught, whatever its type, as a cadre::Error.
//
// Threads: any; call only inside a catch block. Lifetime: the result is a value.
#pragma once

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre {

// cadre::Error: itself. std::bad_alloc: kUnavailable. Everything else is kInvalidArgument, because
// it comes from the program's code or from an argument that libtorch refuses: c10::Error with its
// message without the backtrace, other std::exceptions with what(), and a sentence for a thrown
// value that is no std::exception.
CADRE_EXPORT Error caught_error();

}  // namespace cadre
