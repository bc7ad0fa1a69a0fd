// Operations on symmetric memory: ranks access each other's buffers directly, without a copy
// through staging memory.
//
// Threads and blocking: same as Peers; call after a successful Peers::enter. Lifetime: borrows all
// arguments; the caller keeps the memory until the call returns. Errors: those of Peers' waits.
// kAborted if a rank has left with an error, or has revoked its memory because another group
// failed: that memory may have changed. Cost of all_reduce, n bytes on P ranks: each rank reads n
// and writes n, in one pass, which is the lower bound on memory traffic. The bits equal those of
// the staged operations.
#pragma once

#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/host/buffers.h"
#include "cadre/core/collective/host/peers.h"
#include "cadre/core/collective/host/shared_buffers.h"
#include "cadre/core/collective/op.h"

namespace cadre::host {

// `shared.outs` contains the outputs of all ranks; for a reduce, only the output of the root.
Status direct_all_reduce(Peers& peers, const OpContext& op, const SharedBuffers& shared,
                         size_t num_bytes, ReduceKind kind);
// `offset` is the position of this rank's part, in bytes, in the input of every rank.
Status direct_reduce_scatter(Peers& peers, const OpContext& op, const SharedBuffers& shared,
                             size_t offset, Bytes out, ReduceKind kind);
Status direct_all_gather(Peers& peers, const OpContext& op, const SharedBuffers& shared,
                         const Buffers& buffers, const RankParts& parts);
Status direct_broadcast(Peers& peers, const OpContext& op, const SharedBuffers& shared, Bytes data,
                        Rank root);
// The root copies the inputs of all ranks; the other ranks wait until it has.
Status direct_gather(Peers& peers, const OpContext& op, const SharedBuffers& shared,
                     const Buffers& buffers, const RankParts& parts, Rank root);
// Every rank copies its part from the input of the root, the only one that is read.
Status direct_scatter(Peers& peers, const OpContext& op, const SharedBuffers& shared, Bytes out,
                      Rank root);
// offsets[r] is the position of this rank's part, in bytes, in the input of rank r.
Status direct_all_to_all(Peers& peers, const OpContext& op, const SharedBuffers& shared, Bytes out,
                         const ExchangeParts& parts, const std::vector<size_t>& offsets);

}  // namespace cadre::host
