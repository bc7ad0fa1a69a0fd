// Returns whether two buffers have the same bytes. Uses memcmp, because with std::equal
// ThreadSanitizer would instrument the access to each byte, which is slow.
#pragma once

#include <cstring>

#include "cadre/core/base/types.h"

namespace cadre::testing {

inline bool equal_bytes(ConstBytes a, ConstBytes b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

}  // namespace cadre::testing
