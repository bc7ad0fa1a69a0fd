// The hosts on which the ranks of a group run.
//
// Threads: a plain value. Blocking: never. Errors: none.
// Hosts are numbered in the order of their lowest ranks, from 0. The ranks of a host are listed in
// ascending order, wherever they are among the ranks of the group.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "cadre/core/base/types.h"

namespace cadre {

class HostMap {
 public:
  // host_of_rank[r] is any number that identifies the host of rank r.
  explicit HostMap(std::span<const int> host_of_rank);

  int num_ranks() const { return static_cast<int>(host_of_rank_.size()); }
  int num_hosts() const { return static_cast<int>(ranks_of_host_.size()); }
  int host_of(Rank rank) const { return host_of_rank_[static_cast<size_t>(rank.value)]; }
  // Returns the index of the rank among the ranks of its host.
  int index_of(Rank rank) const { return index_of_rank_[static_cast<size_t>(rank.value)]; }
  const std::vector<Rank>& ranks_of(int host) const {
    return ranks_of_host_[static_cast<size_t>(host)];
  }
  // Returns the number of ranks of the host that has the fewest.
  int fewest_ranks() const { return fewest_; }
  // Returns the number of ranks of the host that has the most.
  int most_ranks() const { return most_; }
  // Returns the ranks with this index on their hosts, in the order of the hosts. REQUIRES: index <
  // fewest_ranks().
  const std::vector<Rank>& column(int index) const { return columns_[static_cast<size_t>(index)]; }
  // Returns all ranks: those of host 0, those of host 1, and so on.
  const std::vector<Rank>& in_host_order() const { return in_host_order_; }
  // Returns whether in_host_order() is the order of the ranks in the group.
  bool is_in_host_order() const { return std::ranges::is_sorted(in_host_order_); }

 private:
  std::vector<int> host_of_rank_;
  std::vector<int> index_of_rank_;
  std::vector<std::vector<Rank>> ranks_of_host_;
  std::vector<std::vector<Rank>> columns_;
  std::vector<Rank> in_host_order_;
  int fewest_ = 0;
  int most_ = 0;
};

}  // namespace cadre
