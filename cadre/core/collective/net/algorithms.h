// The algorithms behind make_schedule: each fills in the steps of one rank.
//
// Threads: pure functions. Blocking: never. REQUIRES: world_size > 1 (see schedule.h).
// The cost is given at each function, with latency a, bandwidth B, P ranks and n bytes.
#pragma once

#include "cadre/core/collective/net/schedule.h"

namespace cadre {

// Returns this rank plus `offset`, modulo the number of ranks.
int around(const ScheduleKey& key, int offset);
Block in_slot(Slot slot, Block block);

// Cost: 2(P-1)a + 2(P-1)/P n/B. The part whose sum is complete on rank p is added in the order p+1,
// p+2, ..., p.
// Source: Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms", 2009.
void add_ring_all_reduce(Schedule& schedule);

// Cost: (P-1)a + (P-1)n/B, with n bytes of output. The order of additions is that of the ring
// all_reduce.
void add_ring_reduce_scatter(Schedule& schedule);
// counts[r] is the number of elements of rank r's part. An empty part is sent as a message, too,
// because messages carry the fingerprint.
void add_ring_reduce_scatter_of(Schedule& schedule, std::span<const uint64_t> counts);

// Cost: (P-1)a + (P-1)n/B, with n bytes of input.
void add_ring_all_gather(Schedule& schedule);

// Cost: log2(P)(a + n/B), and 2(a + n/B) more if P is no power of two. The order of additions is
// the tree over neighbouring ranks: ((0+1)+(2+3))+((4+5)+(6+7)).
// Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication", 2005.
void add_recursive_doubling(Schedule& schedule);

// Cost: log2(P) a + (P-1)n/B. Source: Bruck et al., "Efficient algorithms for all-to-all", 1997.
// Blocks are received at their final positions, so blocks that wrap around take two messages, and
// no rotation at the end is needed.
void add_bruck_all_gather(Schedule& schedule);

// Cost: log2(P)(a + n/B).
void add_binomial_broadcast(Schedule& schedule);

// Cost: (P-2+k)(a + n/(kB)) for k segments: n/B for long messages, whatever P is.
void add_chain_broadcast(Schedule& schedule);

// Reduces to the root. add_tree_reduce() adds in the order of recursive doubling, add_ring_reduce()
// in that of the ring all_reduce, so the root gets the bits of that all_reduce, whichever rank is
// the root.
// Cost of the tree: log2(P)(a + n/B), and a + n/B more if P is no power of two. In each exchange of
// recursive doubling only the partner on the root's side receives.
void add_tree_reduce(Schedule& schedule);

// Cost: 2(P-1)a + 2(P-1)/P n/B: the first half of the ring, then each rank sends its part to the
// root.
void add_ring_reduce(Schedule& schedule);

// Cost: log2(P) a + (P-1)n/B at the root, with n bytes for each rank; ranks inside the tree hold
// the parts of their subtrees.
void add_binomial_gather(Schedule& schedule);
void add_binomial_scatter(Schedule& schedule);

// Cost: (P-1)(a + n/B) at the root, and every byte is sent once.
void add_linear_gather(Schedule& schedule);
void add_linear_scatter(Schedule& schedule);

// Cost: (P-1)(a + n/B), with n bytes for each part: in step s rank r sends to r + s and receives
// from r - s, so no rank has two senders at a time. Source: Thakur, Rabenseifner, Gropp, 2005.
void add_pairwise_exchange(Schedule& schedule);
// Takes the number of elements of each part. Empty parts are not sent.
void add_pairwise_exchange_of(Schedule& schedule, const PartCounts& counts);
void add_pairwise_gather_of(Schedule& schedule, std::span<const uint64_t> counts);

// Cost: log2(P) a. Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization",
// 1988.
void add_dissemination_barrier(Schedule& schedule);

}  // namespace cadre
