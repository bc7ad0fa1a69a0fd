// Options of ZeroRedundancyOptimizer.
//
// Threads: plain values. Equal on all ranks.
#pragma once

#include <cstdint>
#include <optional>

namespace cadre {

struct ZeroOptions {
  // Cap of the flat buffers that hold the parameters: while one buffer is gathered, the next one is
  // stepped. A parameter of more bytes has a buffer of its own.
  int64_t bucket_cap_bytes = int64_t{16} << 20;
  // If true, step() returns when all parameters have arrived. If false, the next forward of the
  // wrapper waits, or wait(), and reading a parameter before that throws. The default is true in
  // stage 1, which has no wrapper that waits, else false.
  std::optional<bool> wait_in_step = {};
};

// The place of the gradients when step() is called.
enum class ZeroStage : uint8_t {
  // Each rank has the whole gradients in parameter.grad(), the same on all ranks.
  kReplicatedGradients = 1,
  kShardedGradients = 2,  // the gradients are reduced to their owners, in the grad() of the shards
};

}  // namespace cadre
