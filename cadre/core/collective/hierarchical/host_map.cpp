#include "cadre/core/collective/hierarchical/host_map.h"

#include <map>

namespace cadre {

HostMap::HostMap(std::span<const int> host_of_rank) {
  std::map<int, int> number_of;
  for (size_t rank = 0; rank < host_of_rank.size(); ++rank) {
    const auto [known, is_new] = number_of.try_emplace(host_of_rank[rank], num_hosts());
    if (is_new) ranks_of_host_.emplace_back();
    std::vector<Rank>& ranks = ranks_of_host_[static_cast<size_t>(known->second)];
    host_of_rank_.push_back(known->second);
    index_of_rank_.push_back(static_cast<int>(ranks.size()));
    ranks.emplace_back(static_cast<int>(rank));
  }
  fewest_ = num_ranks();
  for (const std::vector<Rank>& ranks : ranks_of_host_) {
    fewest_ = std::min(fewest_, static_cast<int>(ranks.size()));
    most_ = std::max(most_, static_cast<int>(ranks.size()));
    in_host_order_.insert(in_host_order_.end(), ranks.begin(), ranks.end());
  }
  columns_.resize(static_cast<size_t>(fewest_));
  for (size_t index = 0; index < columns_.size(); ++index) {
    for (const std::vector<Rank>& ranks : ranks_of_host_) columns_[index].push_back(ranks[index]);
  }
}

}  // namespace cadre
