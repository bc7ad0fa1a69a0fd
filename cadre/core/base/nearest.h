// "Did you mean ...": finds the known word that is most similar to a mistyped one.
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

// Returns the word of `known` that is most similar to `word`; an empty text if the distance to each
// of them is too large for a typing error.
std::string nearest(std::string_view word, std::span<const std::string> known);

}  // namespace cadre
