// Where bytes lie in the memory that the ranks of a host share, as peers can resolve it.
//
// Threads: plain values. Blocking: never. Lifetime: a place names a piece, it does not keep it.
// Errors: none; a place that came from a peer is checked where it is resolved.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cadre {

// A run of bytes.
struct ByteRange {
  size_t begin = 0;
  size_t size = 0;
};

// Travels as bytes. Piece 0 is no place.
struct Place {
  uint32_t piece = 0;    // number of the owner's piece
  uint32_t padding = 0;  // named, because places travel as bytes
  uint64_t offset = 0;   // in the owner's slice

  explicit operator bool() const { return piece != 0; }
  friend bool operator==(const Place&, const Place&) = default;
};
static_assert(sizeof(Place) == 16);

// A place of a peer.
struct SlotPlace {
  int slot = 0;
  Place place;
};

}  // namespace cadre
