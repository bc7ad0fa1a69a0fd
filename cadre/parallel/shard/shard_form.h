// How the ranks that share parameters come to the shards of the others.
//
// Threads: a plain value. Equal on all ranks.
#pragma once

#include <cstdint>

namespace cadre {

enum class ShardForm : uint8_t {
  // Each rank copies them into a buffer of its own.
  kGathered,
  // Where all ranks share memory each reads them where their owners keep them: the buffer is one
  // mapping of all shards, nothing is copied, and a host holds the parameters once. Shards are
  // whole pages. They are written in updates only, see shard_fence.h; else a write throws. Across
  // hosts they are gathered, too.
  kMapped,
};

}  // namespace cadre
