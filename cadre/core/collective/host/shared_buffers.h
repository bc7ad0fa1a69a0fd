// Determines whether an operation can access the buffers of all ranks in place, and at which
// addresses.
//
// Threads: same as Peers; call after a successful Peers::enter whose payload was an Announcement.
// Blocking: never. Lifetime: borrows the memory. Errors: kCorruption for a place that is not in its
// rank's slice, on all ranks alike; kAborted when a rank has left the operation with an error or
// has revoked its memory, or when peers have reported this rank as lost.
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

// The payload of Peers::enter() in a large operation: the places of the rank's buffers, if they are
// in shared memory.
struct Announcement {
  Place in;
  Place out;
};
static_assert(sizeof(Announcement) <= kInlineBytes);

Announcement announcement_of(const Peers& peers, Rank rank);

// Returns kAborted if peers have reported this rank as lost: they may have reused the memory that
// it reads and writes.
Status check_holds(const Peers& peers, const HostMemory& memory);

// The buffers that peers read or write in place.
enum class Sharing {
  kInputs,
  kInputsAndOutputs,
  kInputsAndRootOutput,
  kRootInput,
};

struct Wanted {
  Sharing sharing;
  Rank root = 0;
  // in_bytes[r] is the number of bytes of rank r's input that peers access. A vector with one
  // element gives that number for all ranks.
  std::vector<size_t> in_bytes;
  size_t out_bytes = 0;  // the number of bytes that peers access in each output
};

// The inputs and outputs of all ranks, as this rank maps them, in rank order. `outs` is empty for
// operations that write only their own output; an input that no rank reads is null.
struct SharedBuffers {
  // An allocation in shared memory that contains buffers of a rank.
  struct Source {
    Rank rank;
    const std::atomic<uint64_t>* revocation;
  };

  // Returns an error if a rank no longer provides the memory that it announced. Call it before each
  // access to memory of a peer, and again before a result is returned as valid.
  Status check(const Peers& peers, const OpContext& op) const;

  const HostMemory& memory;
  std::vector<const std::byte*> ins = {};
  std::vector<std::byte*> outs = {};
  std::vector<Source> sources = {};
};

// Returns nullopt if a buffer that peers would access is in private memory. slots[r] is the slot of
// rank r.
Result<std::optional<SharedBuffers>> share_buffers(const Peers& peers, const HostMemory& memory,
                                                   std::span<const int> slots,
                                                   const Wanted& wanted);

}  // namespace cadre::host
