// The buffers of all ranks that an operation uses in place: whether it can, and where they lie.
//
// Threads: as Peers; call after a successful Peers::enter whose payload was an Announcement.
// Blocking: never. Lifetime: borrows the memory. Errors: kCorruption for a place that is not in its
// rank's slice, on all ranks alike; kAborted when a rank has left the operation or has taken its
// memory back, or when peers have reported this rank as lost.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/host/peers.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/memory/host_memory.h"

namespace cadre::host {

// The announcement of a rank in a large operation: the places of its buffers, if they are in shared
// memory.
struct Announcement {
  Place in;
  Place out;
};
static_assert(sizeof(Announcement) <= kInlineBytes);

Announcement announcement_of(const Peers& peers, Rank rank);

// kAborted if peers have reported this rank as lost: they may have reused the memory that it reads
// and writes.
Status check_holds(const Peers& peers, const HostMemory& memory);

// Which buffers peers read or write in place.
enum class Sharing {
  kInputs,
  kInputsAndOutputs,
  kInputsAndRootOutput,
  kRootInput,
};

struct Wanted {
  Sharing sharing;
  Rank root = 0;
  std::vector<size_t> in_bytes;  // accessed by peers in each input, by rank; one entry: all alike
  size_t out_bytes = 0;          // accessed by peers in each output
};

// Every rank's input and output, as mapped here, in rank order. `outs` is empty for operations that
// write only their own output; an input that no rank reads is null.
struct SharedBuffers {
  // A piece in which buffers of a rank lie.
  struct Source {
    Rank rank;
    const std::atomic<uint64_t>* revocation;
  };

  // Whether all memory still holds what its ranks announced. Call it before each access to memory
  // of a peer, and again before a result counts as valid.
  Status check(const Peers& peers, const OpContext& op) const;

  const HostMemory& memory;
  std::vector<const std::byte*> ins = {};
  std::vector<std::byte*> outs = {};
  std::vector<Source> sources = {};
};

// Empty when a wanted buffer is private. `slots`: of the ranks.
Result<std::optional<SharedBuffers>> share_buffers(const Peers& peers, const HostMemory& memory,
                                                   std::span<const int> slots,
                                                   const Wanted& wanted);

}  // namespace cadre::host
