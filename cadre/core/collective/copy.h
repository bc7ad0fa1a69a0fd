// Copies whose stores either stay in the cache or go around it.
//
// Threads: any. Blocking: never. Lifetime: buffers are borrowed until the call returns.
// Errors: none; REQUIRES: the two buffers do not overlap.
#pragma once

#include <cstddef>

namespace cadre {

// Blocks of this size are still in the first-level cache when they are stored a second time.
inline constexpr size_t kCachedBytes = 4096;

// Says how results are stored. Streaming (non-temporal) stores do not read the destination's cache
// lines first and do not take them away from a peer's cache one at a time: they are faster for data
// that is written once and read much later, or by a distant core. When the call returns they are
// complete for every thread that sees a later release store of this thread.
enum class StorePolicy { kCached, kStreaming };

void copy(std::byte* out, const std::byte* in, size_t num_bytes, StorePolicy stores);

}  // namespace cadre
