// Which ranks of a job are connected to which by control connections.
//
// Threads: a pure function. Blocking: never. Errors: none.
// All ranks of a host are connected to each other. Between hosts the edges form a chordal ring:
// hosts at distance 2^k in the list of hosts that have a rank present are neighbours, for all
// 2^k < H, with two edges between different ranks where either host has two. So the graph stays
// connected without any one rank and, of three hosts or more, without any one host, and news
// crosses it in about log2(H) / 2 + 2 hops. A host has at most 4 * ceil(log2(H)) edges, which are
// spread over its ranks. Source: chordal rings after Chord (Stoica et al., SIGCOMM 2001).
#pragma once

#include <vector>

#include "cadre/core/fabric/bootstrap/layout.h"

namespace cadre {

// Ascending. `is_present` is by rank: neither lost nor left; a rank that asks for itself counts as
// present. Symmetric among ranks that are present: each is among the other's neighbours.
std::vector<int> neighbours(const Layout& layout, const std::vector<bool>& is_present, int rank);

}  // namespace cadre
