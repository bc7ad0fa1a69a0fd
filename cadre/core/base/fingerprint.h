// Describes a collective in 16 bytes. The ranks compare their fingerprints before they exchange
// data, and the flight record (the log of recent collectives) stores them. collective/op.h encodes
// and decodes them.
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
