// Returns whether two buffers have the same bytes. Uses memcmp, because std::equal would need a
// call of ThreadSanitizer for each byte.
//
// Threads: a pure function. Blocking: never.
#pragma once

#include <cstring>

#include "cadre/core/base/types.h"

namespace cadre::testing {

inline bool equal_bytes(ConstBytes a, ConstBytes b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

}  // namespace cadre::testing
