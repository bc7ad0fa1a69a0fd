// The ranks of a job, the hosts on which they run, and the addresses at which they listen. All
// ranks have equal layouts.
//
// Threads: a plain value. Blocking: never. Errors: none.
// Hosts are numbered in the order of their lowest ranks. Ranks of one host have equal boot ids in
// their addresses; whether they can share memory is determined later (host_segment.h).
#pragma once

#include <string>
#include <vector>

#include "cadre/core/wire/control.h"

namespace cadre {

struct Layout {
  Layout() = default;
  explicit Layout(std::vector<wire::RankAddress> address_by_rank);

  int num_ranks() const { return static_cast<int>(rank_addresses.size()); }
  int num_hosts() const { return static_cast<int>(ranks_of_host.size()); }
  const wire::RankAddress& rank_address(int rank) const {
    return rank_addresses[static_cast<size_t>(rank)];
  }
  int host_of(int rank) const { return host_of_rank[static_cast<size_t>(rank)]; }
  const std::vector<int>& ranks_of(int host) const {
    return ranks_of_host[static_cast<size_t>(host)];
  }
  // Returns the index, from 0, of a rank among the ranks of its host.
  int slot_of(int rank) const { return slot_of_rank[static_cast<size_t>(rank)]; }
  // Returns text such as "rank 3 (node1, pid 812)".
  std::string describe(int rank) const;

  std::vector<wire::RankAddress> rank_addresses;  // rank_addresses[r] is the address of rank r
  std::vector<int> host_of_rank;  // host_of_rank[r] is the index of the host of rank r
  // slot_of_rank[r] is the index of rank r among the ranks of its host.
  std::vector<int> slot_of_rank;
  // ranks_of_host[h] lists the ranks of host h in ascending order.
  std::vector<std::vector<int>> ranks_of_host;
};

}  // namespace cadre
