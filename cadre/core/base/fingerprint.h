// What an operation is, packed into 16 bytes: ranks compare it before they exchange data, and
// records keep it. collective/op.h packs and reads it.
//
// Threads: a plain value. Blocking: never. Errors: none.
#pragma once

#include <cstdint>

namespace cadre {

struct Fingerprint {
  // Encodes the kind, the dtype, the reduction, the root and the number of elements.
  uint64_t call = 0;
  uint64_t shape = 0;  // encodes the sizes of the tensor; 0 means one dimension

  friend bool operator==(const Fingerprint&, const Fingerprint&) = default;
};

}  // namespace cadre
