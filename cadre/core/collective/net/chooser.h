// Chooses the algorithm of an operation. A pure function, so that all ranks choose the same.
//
// Threads: any. Blocking: never. Errors: none. The choice does not depend on measurements at run
// time; a table may be replaced for a whole group, on all its ranks.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/core/base/types.h"
#include "cadre/core/collective/net/schedule.h"

namespace cadre {

// The sizes from which on the second algorithm of each line is used. reduce follows all_reduce's
// line, so that both give the same bits. The sizes of rings are for up to 8 ranks: the steps of a
// ring grow with the number of ranks, those of the other algorithm with its logarithm, so for more
// ranks the sizes grow in proportion (1,024 ranks: 8 MiB).
struct CrossoverTable {
  uint64_t all_reduce_ring_bytes = 64 << 10;   // recursive doubling, then ring
  uint64_t broadcast_chain_bytes = 256 << 10;  // binomial tree, then chain
  uint64_t all_gather_ring_bytes = 64 << 10;   // output size: Bruck, then ring
  uint64_t chain_segment_bytes = 128 << 10;
  uint64_t gather_linear_bytes = 64 << 10;  // size of the root's buffer: binomial tree, then linear
};

// Returns "all_reduce recursive doubling, ring from 65536 B; ..."
std::string to_string(const CrossoverTable& table);

struct Choice {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUint8;
  uint64_t num_bytes = 0;  // size of the input or the output, whichever is larger
  int world_size = 1;
};

// REQUIRES: kind is a collective.
Algorithm choose(const Choice& choice, const CrossoverTable& table);

}  // namespace cadre
