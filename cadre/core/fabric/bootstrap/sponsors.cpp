#include "cadre/core/fabric/bootstrap/sponsors.h"

#include <bit>

namespace cadre {
namespace {

// Returns a number n: the leader of `host` sponsors the leaders of hosts host + 2^k for each k < n.
int num_branches(const Layout& layout, int host) {
  return host > 0 ? std::countr_zero(static_cast<unsigned>(host))
                  : std::bit_width(static_cast<unsigned>(layout.num_hosts() - 1));
}

}  // namespace

int leader_of(const Layout& layout, int rank) {
  return layout.ranks_of(layout.host_of(rank)).front();
}

int sponsor_of(const Layout& layout, int rank) {
  if (const int leader = leader_of(layout, rank); leader != rank) return leader;
  const int host = layout.host_of(rank);
  return host == 0 ? -1 : layout.ranks_of(host & (host - 1)).front();
}

std::vector<int> sponsored_by(const Layout& layout, int rank) {
  if (leader_of(layout, rank) != rank) return {};
  const int host = layout.host_of(rank);
  std::vector<int> ranks;
  for (int k = num_branches(layout, host) - 1; k >= 0; --k) {
    const int below = host + (1 << k);
    if (below < layout.num_hosts()) ranks.push_back(layout.ranks_of(below).front());
  }
  const std::vector<int>& members = layout.ranks_of(host);
  ranks.insert(ranks.end(), members.begin() + 1, members.end());
  return ranks;
}

int depth_of(const Layout& layout, int rank) {
  const int num_hosts_above = std::popcount(static_cast<unsigned>(layout.host_of(rank)));
  return num_hosts_above + (leader_of(layout, rank) == rank ? 0 : 1);
}

int height_of(const Layout& layout, int rank) {
  return leader_of(layout, rank) == rank ? 1 + num_branches(layout, layout.host_of(rank)) : 0;
}

}  // namespace cadre
