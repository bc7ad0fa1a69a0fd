// Text of a stranger (a file's name, a damaged record, a worker's line) for a terminal.
//
// Threads: a pure function. Blocking: never. Errors: none.
#pragma once

#include <string>
#include <string_view>

#include "cadre/base/export.h"

namespace cadre {

// Control characters, with which a text moves the cursor or begins a line of its own, become \xNN;
// tabs and all other bytes stay.
CADRE_EXPORT std::string printable(std::string_view text);

}  // namespace cadre
