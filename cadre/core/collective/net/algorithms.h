// The algorithms behind make_schedule: each fills in the steps of one rank.
//
// Threads: pure functions. Blocking: never. REQUIRES: world_size > 1 (see schedule.h).
// Cost, with latency a, bandwidth B, P ranks and n bytes: stands at each.
#pragma once

#include "cadre/core/collective/net/schedule.h"

namespace cadre {

// This rank plus an offset, on the circle of ranks.
int around(const ScheduleKey& key, int offset);
Block in_slot(Slot slot, Block block);

// 2(P-1)a + 2(P-1)/P n/B. The part that ends on rank p is added in the order p+1, p+2, ..., p.
// Source: Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms", 2009.
void add_ring_all_reduce(Schedule& schedule);

// (P-1)a + (P-1)n/B, with n bytes of output. The same order of additions.
void add_ring_reduce_scatter(Schedule& schedule);
// counts: elements of each rank's part. An empty part is a message, too: it carries the
// fingerprint.
void add_ring_reduce_scatter_of(Schedule& schedule, std::span<const uint64_t> counts);

// (P-1)a + (P-1)n/B, with n bytes of input.
void add_ring_all_gather(Schedule& schedule);

// log2(P)(a + n/B), and 2(a + n/B) more when P is no power of two. The order of additions is the
// tree over neighbouring ranks: ((0+1)+(2+3))+((4+5)+(6+7)).
// Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication", 2005.
void add_recursive_doubling(Schedule& schedule);

// log2(P) a + (P-1)n/B.  Source: Bruck et al., "Efficient algorithms for all-to-all", 1997; blocks
// are received where they belong, so a run that wraps around takes two messages and no rotation.
void add_bruck_all_gather(Schedule& schedule);

// log2(P)(a + n/B).
void add_binomial_broadcast(Schedule& schedule);

// (P-2+k)(a + n/(kB)) for k segments: n/B for long messages, whatever P.
void add_chain_broadcast(Schedule& schedule);

// Reduce to the root, here and in the next: the additions of the all_reduce of the same name in the
// same order, so that the root gets its bits whatever root it is.
// log2(P)(a + n/B), and a + n/B more when P is no power of two: of two partners of recursive
// doubling only the one on the root's side receives.
void add_tree_reduce(Schedule& schedule);

// 2(P-1)a + 2(P-1)/P n/B: the first half of the ring, then each rank sends its part to the root.
void add_ring_reduce(Schedule& schedule);

// log2(P) a + (P-1)n/B at the root, with n bytes a rank; ranks between hold what comes from beyond.
void add_binomial_gather(Schedule& schedule);
void add_binomial_scatter(Schedule& schedule);

// (P-1)(a + n/B) at the root, and every byte travels once.
void add_linear_gather(Schedule& schedule);
void add_linear_scatter(Schedule& schedule);

// (P-1)(a + n/B), with n bytes a part: in step s rank r sends to r + s and receives from r - s, so
// nobody has two senders at a time. Source: Thakur, Rabenseifner, Gropp, 2005.
void add_pairwise_exchange(Schedule& schedule);
// Empty parts are not sent.
void add_pairwise_exchange_of(Schedule& schedule, const PartCounts& counts);
void add_pairwise_gather_of(Schedule& schedule, std::span<const uint64_t> counts);

// log2(P) a.  Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.
void add_dissemination_barrier(Schedule& schedule);

}  // namespace cadre
