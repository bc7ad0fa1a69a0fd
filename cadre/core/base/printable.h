// Text from outside (a file's name, a damaged record, a worker's line): whether it is UTF-8, and
// its form for a terminal.
//
// Threads: pure functions. Blocking: never. Errors: none.
#pragma once

#include <string>
#include <string_view>

#include "cadre/core/base/export.h"

namespace cadre {

// Control characters, with which a text moves the cursor or begins a line of its own, become \xNN;
// tabs and all other bytes stay.
CADRE_EXPORT std::string printable(std::string_view text);

// JSON can hold no other text. Source: table 3-7 of the Unicode standard.
CADRE_EXPORT bool is_utf8(std::string_view text);

}  // namespace cadre
