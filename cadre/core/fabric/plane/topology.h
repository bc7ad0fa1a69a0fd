// The graph of control connections between the ranks of a job.
//
// Threads: a pure function. Blocking: never. Errors: none.
// All ranks of a host are connected to each other. Between hosts the edges form a chordal ring: in
// the list of the H hosts that have a present rank, hosts at distance 2^k are neighbours, for all
// 2^k < H. Two neighbouring hosts have two edges, between different ranks if either host has two
// ranks. So the graph stays connected without any one rank and, with three hosts or more, without
// any one host. An event crosses it in about log2(H) / 2 + 2 hops. A host has at most 4 *
// ceil(log2(H)) edges, which are spread over its ranks. Source: chordal rings after Chord (Stoica
// et al., SIGCOMM 2001).
#pragma once

#include <vector>

#include "cadre/core/fabric/bootstrap/layout.h"

namespace cadre {

// Returns the neighbours of `rank` in ascending order. is_present[r] says whether rank r is neither
// lost nor left; `rank` itself counts as present. The relation is symmetric: if rank a has the
// neighbour b, b has the neighbour a.
std::vector<int> neighbours(const Layout& layout, const std::vector<bool>& is_present, int rank);

}  // namespace cadre
