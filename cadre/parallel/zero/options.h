// What may be chosen about ZeroRedundancyOptimizer.
//
// Threads: plain values. Equal on all ranks.
#pragma once

#include <cstdint>
#include <optional>

namespace cadre {

struct ZeroOptions {
  // Cap of the flat buffers that hold the parameters: while one is gathered, the next is stepped. A
  // parameter of more bytes has a buffer of its own.
  int64_t bucket_cap_bytes = int64_t{16} << 20;
  // step() returns when all parameters have arrived. If not, the next forward of the wrapper waits,
  // or wait(), and a parameter that is read before throws a sentence. Default: whether no wrapper
  // waits, which is stage 1.
  std::optional<bool> wait_in_step = {};
};

// Where the gradients are when step() is called.
enum class ZeroStage : uint8_t {
  kReplicatedGradients = 1,  // whole and the same on all ranks, in parameter.grad()
  kShardedGradients = 2,     // reduced to their owners, in the grad() of the shards
};

}  // namespace cadre
