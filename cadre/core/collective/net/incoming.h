// The receiving half of one step: puts what arrives in its place, or adds it piece by piece.
//
// Threads: one at a time. Blocking: never. Lifetime: lives for one step; borrows all memory.
// Errors: of the Link. What is to be added passes through a small staging buffer, which stays in
// the core's cache: each piece is added while it is warm and while the rest is still on its way.
#pragma once

#include "cadre/core/collective/net/link.h"
#include "cadre/core/collective/reduce.h"

namespace cadre {

// Where a step's elements lie in memory.
struct IncomingPlace {
  Combine combine = Combine::kStore;
  Bytes target;
  const std::byte* local = nullptr;  // unless kStore
  ReduceKind kind;                   // unless kStore
  int divisor = 1;                   // for complete sums; 1: none
  // The step also sends the target's old content: nothing may be overwritten before it has left.
  bool target_is_sent = false;
};

class Incoming {
 public:
  Incoming(const IncomingPlace& place, Bytes staging) : place_(place), staging_(staging) {}

  // Receives and adds what it can. More than 0 when there was any progress. `num_sent` is how much
  // of what this step sends has left.
  Result<size_t> advance(Link& from, const OperationHeader& operation, size_t num_sent);
  bool is_done(const Link& from) const {
    return from.has_header() && num_done_ == place_.target.size();
  }
  // False while there is no room to receive into.
  bool wants_bytes() const {
    return place_.combine == Combine::kStore || num_staged_ < staging_.size();
  }

 private:
  Result<size_t> store(Link& from, const OperationHeader& operation);
  size_t add_staged(size_t num_sent);

  IncomingPlace place_;
  Bytes staging_;
  size_t num_done_ = 0;    // bytes of the target that are final
  size_t num_staged_ = 0;  // bytes that follow them, in staging
};

}  // namespace cadre
