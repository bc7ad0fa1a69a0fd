#include "cadre/core/fabric/plane/topology.h"

#include <algorithm>

namespace cadre {
namespace {

// Returns the present ranks of each host; hosts without a present rank are left out.
std::vector<std::vector<int>> present_hosts(const Layout& layout,
                                            const std::vector<bool>& is_present, int self) {
  std::vector<std::vector<int>> hosts;
  for (const std::vector<int>& ranks : layout.ranks_of_host) {
    std::vector<int> present;
    for (const int rank : ranks) {
      if (rank == self || is_present[static_cast<size_t>(rank)]) present.push_back(rank);
    }
    if (!present.empty()) hosts.push_back(std::move(present));
  }
  return hosts;
}

// Adds the neighbours in `theirs`, the ranks of a host at distance 2^exponent, of the rank with the
// index `own_index` on its own host, which has `num_own` ranks.
void add_edges(std::vector<int>& found, size_t exponent, size_t own_index, size_t num_own,
               const std::vector<int>& theirs) {
  for (const size_t place : {exponent, exponent + 1}) {
    if (place % num_own == own_index) found.push_back(theirs[place % theirs.size()]);
  }
}

}  // namespace

std::vector<int> neighbours(const Layout& layout, const std::vector<bool>& is_present, int rank) {
  const std::vector<std::vector<int>> hosts = present_hosts(layout, is_present, rank);
  const size_t num_hosts = hosts.size();
  const size_t host = static_cast<size_t>(
      std::find_if(hosts.begin(), hosts.end(),
                   [&](const auto& ranks) { return std::ranges::binary_search(ranks, rank); }) -
      hosts.begin());
  const std::vector<int>& ours = hosts[host];
  const auto own_index = static_cast<size_t>(std::ranges::lower_bound(ours, rank) - ours.begin());
  std::vector<int> found = ours;
  for (size_t exponent = 0, distance = 1; distance < num_hosts; ++exponent, distance *= 2) {
    for (const size_t other : {host + distance, host + num_hosts - distance}) {
      add_edges(found, exponent, own_index, ours.size(), hosts[other % num_hosts]);
    }
  }
  std::ranges::sort(found);
  found.erase(std::unique(found.begin(), found.end()), found.end());
  std::erase(found, rank);
  return found;
}

}  // namespace cadre
