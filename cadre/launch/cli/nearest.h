// "Did you mean ...": the known word that is most similar to a mistyped one.
//
// Threads: pure functions. Blocking: never. Source: Levenshtein's edit distance.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace cadre::cli {

// Returns the most similar of `known`; empty if none is similar enough for a likely typing error.
std::string nearest(std::string_view word, std::span<const std::string> known);

}  // namespace cadre::cli
