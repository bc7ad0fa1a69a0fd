// The algorithms behind make_schedule: each fills in the steps of one rank.
//
// Threads: pure functions. Blocking: never. REQUIRES: world_size > 1 (see schedule.h).
// Cost, with latency a, bandwidth B, P ranks and n bytes: stands at each.
#pragma once

#include "cadre/collective/net/schedule.h"

namespace cadre {

// 2(P-1)a + 2(P-1)/P n/B. The part that ends on rank p is added in the order p+1, p+2, ..., p.
// Source: Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms", 2009.
void add_ring_all_reduce(Schedule& schedule);

// (P-1)a + (P-1)n/B, with n bytes of output. The same order of additions.
void add_ring_reduce_scatter(Schedule& schedule);

// (P-1)a + (P-1)n/B, with n bytes of input.
void add_ring_all_gather(Schedule& schedule);

// log2(P)(a + n/B), and 2(a + n/B) more when P is no power of two. The order of additions is the
// tree over neighbouring ranks: ((0+1)+(2+3))+((4+5)+(6+7)).
// Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication", 2005.
void add_recursive_doubling(Schedule& schedule);

// log2(P) a + (P-1)n/B.  Source: Bruck et al., "Efficient algorithms for all-to-all", 1997; blocks
// are received where they belong, so a run that wraps round takes two messages and no rotation.
void add_bruck_all_gather(Schedule& schedule);

// log2(P)(a + n/B).
void add_binomial_broadcast(Schedule& schedule);

// (P-2+k)(a + n/(kB)) for k segments: n/B for long messages, whatever P.
void add_chain_broadcast(Schedule& schedule);

// log2(P) a.  Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.
void add_dissemination_barrier(Schedule& schedule);

}  // namespace cadre
