// The position of bytes in the memory that the ranks of a host share, in a form that peers can
// resolve.
//
// Threads: plain values. Blocking: never. Lifetime: a place refers to a piece but does not keep it.
// Errors: none; a place that came from a peer is checked where it is resolved.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cadre {

// A contiguous range of bytes.
struct ByteRange {
  size_t begin = 0;
  size_t size = 0;
};

// Ranks send a Place to each other as raw bytes. Piece number 0 means that there is no place.
struct Place {
  uint32_t piece = 0;    // the number of the piece at its owner
  uint32_t padding = 0;  // is explicit because places are sent as bytes
  uint64_t offset = 0;   // the offset in the owner's slice

  explicit operator bool() const { return piece != 0; }
  friend bool operator==(const Place&, const Place&) = default;
};
static_assert(sizeof(Place) == 16);

// A place in the slice of the rank in `slot`.
struct SlotPlace {
  int slot = 0;
  Place place;
};

}  // namespace cadre
