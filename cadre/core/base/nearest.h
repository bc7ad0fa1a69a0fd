// "Did you mean ...": the known word that is most similar to a mistyped one.
//
// Threads: pure functions. Errors: none. Source: V. Levenshtein's edit distance.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "cadre/core/base/export.h"

namespace cadre {

// Returns the least number of insertions, deletions and replacements of a byte that turn one word
// into the other.
CADRE_EXPORT size_t edit_distance(std::string_view a, std::string_view b);

// Returns the most similar of `known`; empty if none is similar enough for a likely typing error.
std::string nearest(std::string_view word, std::span<const std::string> known);

}  // namespace cadre
