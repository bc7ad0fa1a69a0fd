// Converts bytes to hexadecimal digits in lower case.
//
// Threads: a pure function. Blocking: never. Errors: none.
#pragma once

#include <string>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::wire {

CADRE_EXPORT std::string to_hex(ConstBytes bytes);

}  // namespace cadre::wire
