// What an operation is, packed into 16 bytes: ranks compare it before they exchange data, and
// records keep it. collective/op.h packs and reads it.
//
// Threads: a plain value. Blocking: never. Errors: none.
#pragma once

#include <cstdint>

namespace cadre {

struct Fingerprint {
  uint64_t call = 0;   // kind, dtype, reduction, root, number of elements
  uint64_t shape = 0;  // the sizes of the tensor; 0: one dimension

  friend bool operator==(const Fingerprint&, const Fingerprint&) = default;
};

}  // namespace cadre
