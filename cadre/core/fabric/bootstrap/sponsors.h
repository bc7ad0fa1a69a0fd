// The tree along which the layout of a job is handed out and its connections are reported ready.
//
// Threads: plain functions. Blocking: never. Errors: none.
// The sponsor of a rank is the lowest rank of its host, the host's leader. That of the leader of
// host h > 0 is the leader of host h - lowbit(h): a binomial tree over hosts with rank 0 at the
// root, so that P ranks on H hosts get the layout after ceil(log2(H)) + 1 steps.
#pragma once

#include <vector>

#include "cadre/core/fabric/bootstrap/layout.h"

namespace cadre {

// The lowest rank of the rank's host.
int leader_of(const Layout& layout, int rank);
// -1 for rank 0, which has none.
int sponsor_of(const Layout& layout, int rank);
// In the order in which the layout goes to them: leaders with the most hosts below them first.
std::vector<int> sponsored_by(const Layout& layout, int rank);
// The number of steps from rank 0.
int depth_of(const Layout& layout, int rank);
// Upper bound of the height of the tree below the rank: 0 for a rank that sponsors none.
int height_of(const Layout& layout, int rank);

}  // namespace cadre
