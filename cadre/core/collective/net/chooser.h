// Chooses the algorithm of an operation. A pure function, so that all ranks choose the same.
//
// Threads: any. Blocking: never. Errors: none. The choice does not depend on measurements at run
// time. All ranks of a group have one table: the default, or that of rank 0's tuning file
// (tuning_file.h).
#pragma once

#include <cstdint>
#include <string>

#include "cadre/core/base/types.h"
#include "cadre/core/collective/net/schedule.h"

namespace cadre {

// The sizes in bytes at which an operation changes from its first to its second algorithm. reduce
// uses the size of all_reduce, so that both give the same bits. The sizes of rings hold for up to 8
// ranks. The steps of a ring grow with the number of ranks, those of the other algorithm with its
// logarithm. So for more ranks the sizes are multiplied by num_ranks / 8: up to 8 MiB for 1,024
// ranks.
struct CrossoverTable {
  // Recursive doubling is used below this size, a ring from it on.
  uint64_t all_reduce_ring_bytes = 64 << 10;
  // A binomial tree is used below this size, a chain from it on.
  uint64_t broadcast_chain_bytes = 256 << 10;
  // The size is that of the output. Bruck's algorithm is used below this size, a ring from it on.
  uint64_t all_gather_ring_bytes = 64 << 10;
  uint64_t chain_segment_bytes = 128 << 10;
  // The size is that of the root's buffer. A binomial tree is used below this size, a linear
  // schedule from it on.
  uint64_t gather_linear_bytes = 64 << 10;

  friend bool operator==(const CrossoverTable&, const CrossoverTable&) = default;
};

// The largest size of a table.
inline constexpr uint64_t kMaxCrossoverBytes = uint64_t{1} << 40;

// Returns the factor by which the sizes of rings are multiplied for this number of ranks.
uint64_t ring_factor(int world_size);

// Returns a text such as "all_reduce recursive doubling, ring from 65536 B; ...".
std::string to_string(const CrossoverTable& table);

struct Choice {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUint8;
  uint64_t num_bytes = 0;  // the size of the input or of the output, whichever is larger
  int world_size = 1;
};

// Returns the algorithm that all ranks use. REQUIRES: choice.kind is a collective.
Algorithm choose(const Choice& choice, const CrossoverTable& table);

}  // namespace cadre
