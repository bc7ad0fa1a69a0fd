// Checks whether text from outside (a file's name, a damaged record, a worker's line) is UTF-8, and
// converts it for a terminal.
//
// Threads: pure functions. Blocking: never. Errors: none.
#pragma once

#include <string>
#include <string_view>

#include "cadre/core/base/export.h"

namespace cadre {

// Replaces control characters, with which a text could move the cursor or begin a new line, by
// \xNN. Tabs and all other bytes stay.
CADRE_EXPORT std::string printable(std::string_view text);

// Returns whether the text is valid UTF-8, as JSON requires. Source: table 3-7 of the Unicode
// standard.
CADRE_EXPORT bool is_utf8(std::string_view text);

}  // namespace cadre
