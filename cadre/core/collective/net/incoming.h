// The receiving half of one step: stores received bytes at their position, or adds them piece by
// piece.
//
// Threads: one at a time. Blocking: never. Lifetime: lives for one step; borrows all memory.
// Errors: those of the Link. Bytes to be added pass through a small staging buffer, which stays in
// the core's cache: each piece is added while it is in the cache and the rest is still being
// received.
#pragma once

#include "cadre/core/collective/net/link.h"
#include "cadre/core/collective/reduce.h"

namespace cadre {

// The memory for the elements that a step receives.
struct IncomingPlace {
  Combine combine = Combine::kStore;
  Bytes target;
  const std::byte* local = nullptr;  // null for kStore
  ReduceKind kind;                   // unused for kStore
  int divisor = 1;                   // divides complete sums; 1: no division
  // The step also sends the old content of the target, which must not be overwritten before it is
  // sent.
  bool target_is_sent = false;
};

class Incoming {
 public:
  Incoming(const IncomingPlace& place, Bytes staging) : place_(place), staging_(staging) {}

  // Receives and adds as much as possible. Returns more than 0 if there was any progress.
  // `num_sent` is the number of bytes of this step's send that have been sent.
  Result<size_t> advance(Link& from, const OperationHeader& operation, size_t num_sent);
  bool is_done(const Link& from) const {
    return from.has_header() && num_done_ == place_.target.size();
  }
  // Returns false while there is no room to receive into.
  bool wants_bytes() const {
    return place_.combine == Combine::kStore || num_staged_ < staging_.size();
  }

 private:
  Result<size_t> store(Link& from, const OperationHeader& operation);
  size_t add_staged(size_t num_sent);

  IncomingPlace place_;
  Bytes staging_;
  size_t num_done_ = 0;    // bytes of the target that are final
  size_t num_staged_ = 0;  // bytes after the final ones, in staging
};

}  // namespace cadre
