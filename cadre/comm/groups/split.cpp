#include "cadre/comm/groups/split.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/base/fnv1a.h"
#include "cadre/base/format.h"

namespace cadre {
namespace {

[[noreturn]] void refuse(const Communicator& parent, const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument,
              format("group \"{}\", rank {}: {}", parent.name(), parent.rank(), problem));
}

// What every rank of the parent brings, gathered in rank order.
template <typename T>
std::vector<T> gather(Communicator& parent, const T& mine, Deadline deadline) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(int64_t) == 0);
  std::vector<T> all(static_cast<size_t>(parent.world_size()));
  parent.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)),
                    DType::kInt64, {.deadline = deadline});
  return all;
}

struct GroupLabel {
  std::string name;
  std::string id;
};

// Beside the parent's record: one file for each group that the rank is in.
std::string record_path(const Communicator& parent, const GroupLabel& label, Rank rank) {
  const std::string& parent_path = parent.options().flight_record_path;
  if (parent_path.empty()) return "";
  std::string group = label.name == label.id ? label.id : format("{}@{}", label.name, label.id);
  std::replace(group.begin(), group.end(), '/', '.');
  const std::string file =
      format("{}-round{}-rank{}.flight", group, parent.membership().round, rank);
  return (std::filesystem::path(parent_path).parent_path() / file).string();
}

// The group of `members`, ranks of the parent in the order of the new group, on one of them.
std::unique_ptr<Communicator> connect_members(const Communicator& parent, const GroupLabel& label,
                                              std::span<const int> members, Deadline deadline) {
  const auto self = std::find(members.begin(), members.end(), parent.rank().value);
  Membership membership = parent.membership();
  membership.rank = static_cast<int>(self - members.begin());
  membership.world_size = static_cast<int>(members.size());
  membership.job_size = 0;  // the wills are those of the parent's ranks
  CommunicatorOptions options = parent.options();
  options.name = label.name;
  options.id = label.id;
  options.flight_record_path = record_path(parent, label, membership.rank);
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

uint64_t digest(std::span<const Rank> ranks) {
  Fnv1a hash;
  for (const Rank rank : ranks) hash.add(static_cast<uint64_t>(rank.value));
  return hash.value();
}

uint64_t digest(std::string_view text) {
  Fnv1a hash;
  hash.add(text);
  return hash.value();
}

std::string list(std::span<const Rank> ranks) {
  std::string text;
  for (const Rank rank : ranks) text += format("{}{}", text.empty() ? "" : ", ", rank);
  return text;
}

// What one rank wants of a split.
struct SplitCall {
  int64_t has_color = 0;
  int64_t color = 0;
  int64_t key = 0;
  uint64_t name_digest = 0;
  std::array<char, 32> name{};  // as much of it as there is room for, padded with zeros

  bool is_of(int64_t wanted) const { return has_color == 1 && color == wanted; }
  std::string quoted_name() const {
    const std::string text(name.data(), std::find(name.begin(), name.end(), '\0'));
    return format("\"{}{}\"", text, text.size() == name.size() ? "..." : "");
  }
};

SplitCall call_of(const SplitOptions& options) {
  SplitCall call{options.color ? 1 : 0, options.color.value_or(0), options.key,
                 digest(options.name)};
  std::copy_n(options.name.begin(), std::min(options.name.size(), call.name.size()),
              call.name.begin());
  return call;
}

// Every rank of the parent sees all calls, so all of them refuse with one sentence.
void check_names(const Communicator& parent, std::span<const SplitCall> calls) {
  for (size_t i = 0; i < calls.size(); ++i) {
    for (size_t first = 0; calls[i].has_color == 1 && first < i; ++first) {
      if (!calls[first].is_of(calls[i].color)) continue;
      if (calls[first].name_digest == calls[i].name_digest) break;
      throw Error(
          ErrorCode::kInvalidArgument,
          format("group \"{}\": split: rank {} names the group of color {} {}, rank {} names "
                 "it {}: let all ranks of a color give one name",
                 parent.name(), first, calls[i].color, calls[first].quoted_name(), i,
                 calls[i].quoted_name()));
    }
  }
}

}  // namespace

std::unique_ptr<Communicator> split(Communicator& parent, const SplitOptions& options,
                                    Deadline deadline) {
  const uint64_t number = parent.num_collectives() + 1;
  const std::vector<SplitCall> calls = gather(parent, call_of(options), deadline);
  check_names(parent, calls);
  if (!options.color) return nullptr;
  std::vector<int> members;
  for (int rank = 0; rank < parent.world_size(); ++rank) {
    if (calls[static_cast<size_t>(rank)].is_of(*options.color)) members.push_back(rank);
  }
  std::stable_sort(members.begin(), members.end(), [&calls](int a, int b) {
    return calls[static_cast<size_t>(a)].key < calls[static_cast<size_t>(b)].key;
  });
  GroupLabel label{options.name, format("{}/{}.{}", parent.id(), number, *options.color)};
  if (label.name.empty()) label.name = format("{}/{}.{}", parent.name(), number, *options.color);
  return connect_members(parent, label, members, deadline);
}

std::unique_ptr<Communicator> new_group(Communicator& parent, std::span<const Rank> ranks,
                                        Deadline deadline) {
  check_list(parent, ranks);
  const uint64_t number = parent.num_collectives() + 1;
  const uint64_t mine = digest(ranks);
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
  const GroupLabel label{format("{}/{}", parent.name(), number),
                         format("{}/{}", parent.id(), number)};
  return connect_members(parent, label, members, deadline);
}

}  // namespace cadre
