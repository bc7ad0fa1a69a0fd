// The tree along which the ranks of a job distribute the layout and report that their connections
// are ready.
//
// Threads: plain functions. Blocking: never. Errors: none.
// The sponsor of a rank is the leader of its host: the host's lowest rank. The sponsor of the
// leader of host h > 0 is the leader of host h - lowbit(h), where lowbit(h) is the lowest set bit
// of h: a binomial tree over hosts with rank 0 at the root. So P ranks on H hosts get the layout
// after ceil(log2(H)) + 1 steps.
#pragma once

#include <vector>

#include "cadre/core/fabric/bootstrap/layout.h"

namespace cadre {

// Returns the lowest rank of the rank's host.
int leader_of(const Layout& layout, int rank);
// Returns the rank that sends this rank the layout; -1 for rank 0, which has no sponsor.
int sponsor_of(const Layout& layout, int rank);
// Returns the ranks that this rank sponsors, in the order in which they get the layout: leaders
// with the most hosts below them in the tree come first.
std::vector<int> sponsored_by(const Layout& layout, int rank);
// Returns the number of steps of the tree from rank 0 to this rank.
int depth_of(const Layout& layout, int rank);
// Returns an upper bound of the height of the tree below the rank; 0 if it sponsors no rank.
int height_of(const Layout& layout, int rank);

}  // namespace cadre
