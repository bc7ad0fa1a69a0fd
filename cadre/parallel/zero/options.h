// Defines the options of ZeroRedundancyOptimizer.
//
// All ranks must pass the same options.
#pragma once

#include <cstdint>
#include <optional>

namespace cadre {

struct ZeroOptions {
  // The maximum size of the flat buffers that hold the parameters. The gather of one buffer
  // overlaps with the step of the next one. A parameter that is larger than this gets its own
  // buffer.
  int64_t bucket_cap_bytes = int64_t{16} << 20;
  // If true, step() waits until all parameters are gathered. If false, step() returns earlier, and
  // the next forward of the wrapper, or wait(), waits for the gathers; reading a parameter before
  // that throws. The default is true in stage 1, else false.
  std::optional<bool> wait_in_step = {};
};

// Where the gradients are when step() is called.
enum class ZeroStage : uint8_t {
  // Each rank has the whole reduced gradients in parameter.grad().
  kReplicatedGradients = 1,
  // Each rank has only the gradients of its shards, in the grad() of ParameterShard::values.
  kShardedGradients = 2,
};

}  // namespace cadre
