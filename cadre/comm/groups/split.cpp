#include "cadre/comm/groups/split.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>
#include <vector>

#include "cadre/base/format.h"

namespace cadre {
namespace {

[[noreturn]] void refuse(const Communicator& parent, const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument,
              format("group \"{}\", rank {}: {}", parent.name(), parent.rank(), problem));
}

// What every rank of the parent brings, gathered in rank order.
template <size_t N>
std::vector<std::array<int64_t, N>> gather(Communicator& parent, const std::array<int64_t, N>& mine,
                                           Deadline deadline) {
  std::vector<std::array<int64_t, N>> all(static_cast<size_t>(parent.world_size()));
  parent.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)),
                    DType::kInt64, {.deadline = deadline});
  return all;
}

// Beside the parent's record: one file for each group that the rank is in.
std::string record_path(const Communicator& parent, std::string name, Rank rank) {
  const std::string& parent_path = parent.options().flight_record_path;
  if (parent_path.empty()) return "";
  std::replace(name.begin(), name.end(), '/', '.');
  const std::string file =
      format("{}-round{}-rank{}.flight", name, parent.membership().round, rank);
  return (std::filesystem::path(parent_path).parent_path() / file).string();
}

// The group of `members`, ranks of the parent in the order of the new group, on one of them.
std::unique_ptr<Communicator> connect_members(const Communicator& parent, const std::string& name,
                                              std::span<const int> members, Deadline deadline) {
  const auto self = std::find(members.begin(), members.end(), parent.rank().value);
  Membership membership = parent.membership();
  membership.rank = static_cast<int>(self - members.begin());
  membership.world_size = static_cast<int>(members.size());
  CommunicatorOptions options = parent.options();
  options.name = name;
  options.flight_record_path = record_path(parent, name, membership.rank);
  return Communicator::connect(parent.system(), membership, options, deadline);
}

void check_list(const Communicator& parent, std::span<const Rank> ranks) {
  if (ranks.empty()) refuse(parent, "new_group: the list of ranks is empty");
  std::vector<bool> is_named(static_cast<size_t>(parent.world_size()));
  for (const Rank rank : ranks) {
    if (rank < 0 || rank >= parent.world_size()) {
      refuse(parent, format("new_group: rank {} is not in the group of {} ranks", rank,
                            parent.world_size()));
    }
    if (is_named[static_cast<size_t>(rank.value)]) {
      refuse(parent, format("new_group: rank {} is in the list twice", rank));
    }
    is_named[static_cast<size_t>(rank.value)] = true;
  }
}

// Of the list in its order: FNV-1a, to compare lists, not to hide them.
uint64_t digest(std::span<const Rank> ranks) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const Rank rank : ranks) hash = (hash ^ static_cast<uint64_t>(rank.value)) * 0x100000001b3;
  return hash;
}

std::string list(std::span<const Rank> ranks) {
  std::string text;
  for (const Rank rank : ranks) text += format("{}{}", text.empty() ? "" : ", ", rank);
  return text;
}

}  // namespace

std::unique_ptr<Communicator> split(Communicator& parent, const SplitOptions& options,
                                    Deadline deadline) {
  const uint64_t number = parent.num_collectives() + 1;
  const std::array<int64_t, 3> mine = {options.color ? 1 : 0, options.color.value_or(0),
                                       options.key};
  const auto all = gather(parent, mine, deadline);
  if (!options.color) return nullptr;
  std::vector<int> members;
  for (int rank = 0; rank < parent.world_size(); ++rank) {
    const auto& [has_color, color, key] = all[static_cast<size_t>(rank)];
    if (has_color == 1 && color == *options.color) members.push_back(rank);
  }
  std::stable_sort(members.begin(), members.end(), [&all](int a, int b) {
    return all[static_cast<size_t>(a)][2] < all[static_cast<size_t>(b)][2];
  });
  const std::string name = options.name.empty()
                               ? format("{}/{}.{}", parent.name(), number, *options.color)
                               : options.name;
  return connect_members(parent, name, members, deadline);
}

std::unique_ptr<Communicator> new_group(Communicator& parent, std::span<const Rank> ranks,
                                        Deadline deadline) {
  check_list(parent, ranks);
  const uint64_t number = parent.num_collectives() + 1;
  const std::array<int64_t, 1> mine = {static_cast<int64_t>(digest(ranks))};
  const auto all = gather(parent, mine, deadline);
  const auto other =
      std::find_if(all.begin(), all.end(), [&](const auto& his) { return his != mine; });
  if (other != all.end()) {
    refuse(parent, format("new_group: this rank wants the ranks {}, rank {} wants others: every "
                          "rank must name the same ranks in the same order",
                          list(ranks), other - all.begin()));
  }
  std::vector<int> members;
  for (const Rank rank : ranks) members.push_back(rank.value);
  if (std::find(members.begin(), members.end(), parent.rank().value) == members.end()) {
    return nullptr;
  }
  return connect_members(parent, format("{}/{}", parent.name(), number), members, deadline);
}

}  // namespace cadre
