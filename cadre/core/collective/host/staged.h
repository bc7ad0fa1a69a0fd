// Large operations on private memory: pipelines through the staging chunks of the arena.
//
// Threads and blocking: same as Peers; call after a successful Peers::enter. Lifetime: borrows all
// arguments. Errors: those of Peers' waits.
// Cost of all_reduce, n bytes on P ranks: each rank copies n (P-1)/P in, reads n to reduce its
// share of each chunk, and copies n (P-1)/P out; the staging stays in the caches. (DeepSpeed's
// "distributed all-reduce" and Rabenseifner's two phases, cut into chunks that overlap.) Every
// element is added in rank order by the rank that owns it, and copied by all others, so the bits
// equal those of any other reduction in rank order.
#pragma once

#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/host/buffers.h"
#include "cadre/core/collective/host/peers.h"
#include "cadre/core/collective/op.h"

namespace cadre::host {

Status staged_all_reduce(Peers& peers, const OpContext& op, const Buffers& buffers,
                         ReduceKind kind);
Status staged_reduce_scatter(Peers& peers, const OpContext& op, const Buffers& buffers,
                             const RankParts& parts, ReduceKind kind);
// Does the same as staged_all_reduce, but only the root stores the result; `out` is empty on other
// ranks.
Status staged_reduce(Peers& peers, const OpContext& op, const Buffers& buffers, ReduceKind kind,
                     Rank root);
Status staged_all_gather(Peers& peers, const OpContext& op, const Buffers& buffers,
                         const RankParts& parts);
Status staged_broadcast(Peers& peers, const OpContext& op, Bytes data, Rank root);
// The output of a gather and the input of a scatter are empty on ranks other than the root.
Status staged_gather(Peers& peers, const OpContext& op, const Buffers& buffers, Rank root);
Status staged_scatter(Peers& peers, const OpContext& op, const Buffers& buffers, Rank root);
Status staged_all_to_all(Peers& peers, const OpContext& op, const Buffers& buffers,
                         const ExchangeParts& parts);

}  // namespace cadre::host
