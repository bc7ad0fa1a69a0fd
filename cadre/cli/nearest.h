// "Did you mean ...": the known word that is nearest to a mistyped one.
//
// Threads: pure functions. Blocking: never. Source: Levenshtein's edit distance.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace cadre::cli {

// The nearest of `known`; empty when none is near enough to be a likely typing error.
std::string nearest(std::string_view word, std::span<const std::string> known);

}  // namespace cadre::cli
