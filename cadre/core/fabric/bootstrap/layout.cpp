#include "cadre/core/fabric/bootstrap/layout.h"

#include <map>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre {

Layout::Layout(std::vector<wire::RankAddress> address_by_rank)
    : rank_addresses(std::move(address_by_rank)) {
  std::map<std::string_view, int> host_of_boot_id;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const auto [found, is_new] =
        host_of_boot_id.try_emplace(rank_address(rank).boot_id, num_hosts());
    if (is_new) ranks_of_host.emplace_back();
    std::vector<int>& neighbours = ranks_of_host[static_cast<size_t>(found->second)];
    host_of_rank.push_back(found->second);
    slot_of_rank.push_back(static_cast<int>(neighbours.size()));
    neighbours.push_back(rank);
  }
}

std::string Layout::describe(int rank) const {
  if (rank < 0 || rank >= num_ranks()) return format("rank {}", rank);
  return format("rank {} ({}, pid {})", rank, rank_address(rank).host, rank_address(rank).pid);
}

}  // namespace cadre
