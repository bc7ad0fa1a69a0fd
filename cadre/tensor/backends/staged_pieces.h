// Divides a collective on memory of a device into pieces that the host runs one after the other.
//
// Threads: pure functions. The division is equal on all ranks: it depends on the kind, the count
// and the number of ranks only.
#pragma once

#include <cstddef>
#include <vector>

#include "cadre/core/base/types.h"
#include "cadre/core/collective/collective.h"

namespace cadre::staged {

// A copy between the device and the memory of a piece.
struct Copy {
  std::byte* on_device = nullptr;
  size_t offset = 0;  // its begin in the memory of the piece
  size_t num_bytes = 0;
};

struct Range {
  size_t offset = 0;  // its begin in the memory of the piece
  size_t num_bytes = 0;
};

struct Piece {
  std::vector<Copy> to_host = {};
  std::vector<Copy> to_device = {};
  Range in = {};  // the input and output of the host's collective
  Range out = {};
  size_t num_bytes = 0;  // the memory of the piece
};

// Returns one piece at least. REQUIRES: validate() has succeeded for the collective.
std::vector<Piece> pieces_of(const Collective& collective, Rank rank, int world_size,
                             size_t piece_bytes);

}  // namespace cadre::staged
