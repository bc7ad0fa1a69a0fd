// Copies whose stores either stay in the cache or go around it.
//
// Threads: any. Blocking: never. Lifetime: buffers are borrowed until the call returns.
// Errors: none; REQUIRES: the two buffers do not overlap.
#pragma once

#include <cstddef>

namespace cadre {

// The size of blocks that are computed first and copied to their destination afterwards: a block of
// this size is still in the L1 cache when it is copied.
inline constexpr size_t kCachedBytes = 4096;

// Says how results are stored. Streaming (non-temporal) stores write to memory without first
// loading the destination's cache lines. So they are faster for data that is written once and read
// much later, or by a distant core. A thread that sees a release store which follows the copy also
// sees the copied data.
enum class StorePolicy { kCached, kStreaming };

void copy(std::byte* out, const std::byte* in, size_t num_bytes, StorePolicy stores);

}  // namespace cadre
