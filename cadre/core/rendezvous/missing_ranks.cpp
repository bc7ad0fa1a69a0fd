#include "cadre/core/rendezvous/missing_ranks.h"

#include <algorithm>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

Status search(Store& store, std::span<const std::string> keys, int first, Deadline deadline,
              std::vector<int>& missing) {
  const auto are_set = store.check(keys, deadline);
  if (!are_set.ok()) return are_set.error();
  if (*are_set) return {};
  if (keys.size() == 1) {
    missing.push_back(first);
    return {};
  }
  const size_t half = keys.size() / 2;
  CADRE_RETURN_IF_ERROR(search(store, keys.first(half), first, deadline, missing));
  return search(store, keys.subspan(half), first + static_cast<int>(half), deadline, missing);
}

}  // namespace

Result<std::vector<int>> find_missing_ranks(Store& store, std::span<const std::string> keys,
                                            Deadline deadline) {
  std::vector<int> missing;
  CADRE_RETURN_IF_ERROR(search(store, keys, 0, deadline, missing));
  return missing;
}

std::string name_ranks(std::span<const int> ranks) {
  constexpr size_t kMaxNamed = 8;
  if (ranks.empty()) return "one rank or more";
  std::string names;
  for (const int rank : ranks.first(std::min(ranks.size(), kMaxNamed))) {
    names += format("{}rank {}", names.empty() ? "" : ", ", rank);
  }
  if (ranks.size() > kMaxNamed) names += format(" and {} more", ranks.size() - kMaxNamed);
  return names;
}

}  // namespace cadre
