#include "cadre/core/comm/groups/split.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <exception>
#include <numeric>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/checks.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/comm/groups/make_group.h"
#include "cadre/core/comm/queue/thrown_error.h"

namespace cadre {
namespace {

[[noreturn]] void refuse_list(const Communicator& parent, std::span<const Rank> ranks, int other) {
  throw refusal_of(parent, "new_group",
                   format("this rank passes the ranks {}, but rank {} passes others: every rank "
                          "must pass the same ranks in the same order",
                          list_of(ranks), other));
}

std::vector<int> all_ranks(const Communicator::Impl& group) {
  std::vector<int> ranks(static_cast<size_t>(group.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// The arguments of one rank in a split, as the ranks exchange them.
struct SplitCall {
  int64_t has_color = 0;
  int64_t color = 0;
  int64_t key = 0;
  uint64_t name_digest = 0;
  std::array<char, 32> name{};  // is truncated, or padded with zeros
  int64_t is_short = 0;         // 1 if the rank has no memory for its pieces
  GroupPlaces places;           // the places of the pieces that the rank has allocated

  bool is_of(int64_t wanted) const { return has_color == 1 && color == wanted; }
  std::string quoted_name() const {
    const std::string text(name.data(), std::find(name.begin(), name.end(), '\0'));
    return format("\"{}{}\"", text, text.size() == name.size() ? "..." : "");
  }
};

// Gathers the arguments of all ranks of the parent in rank order. If that fails on this rank, other
// ranks may have created the new group already, so the failure is published.
template <typename T>
std::vector<T> gather(Communicator& parent, std::string_view call, const T& mine,
                      const std::optional<GroupIdentity>& identity, Deadline deadline) try {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(int64_t) == 0);
  std::vector<T> all(static_cast<size_t>(parent.world_size()));
  parent.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)),
                    DType::kInt64, {.deadline = deadline, .call = call});
  return all;
} catch (const std::exception& thrown) {
  if (identity) tell_giving_up(CommunicatorParts::impl_of(parent), *identity, error_of(thrown));
  throw;
}

SplitCall call_of(const SplitOptions& options) {
  SplitCall call{.has_color = options.color ? 1 : 0,
                 .color = options.color.value_or(0),
                 .key = options.key,
                 .name_digest = fnv1a(options.name)};
  std::copy_n(options.name.begin(), std::min(options.name.size(), call.name.size()),
              call.name.begin());
  return call;
}

// Throws if ranks of one color pass different names. Every rank of the parent sees all arguments,
// so all ranks throw the same error.
void check_names(const Communicator& parent, std::span<const SplitCall> calls) {
  for (size_t i = 0; i < calls.size(); ++i) {
    for (size_t first = 0; calls[i].has_color == 1 && first < i; ++first) {
      if (!calls[first].is_of(calls[i].color)) continue;
      if (calls[first].name_digest == calls[i].name_digest) break;
      throw refusal_of(
          parent, "split",
          format("rank {} names the group of color {} {}, rank {} names it {}: let all ranks of a "
                 "color give one name",
                 first, calls[i].color, calls[first].quoted_name(), i, calls[i].quoted_name()));
    }
  }
}

}  // namespace

std::unique_ptr<Communicator> split(Communicator& parent, const SplitOptions& given,
                                    Deadline deadline) {
  SplitOptions options = given;
  if (options.color.value_or(0) < 0) options.color.reset();
  const uint64_t number = parent.num_collectives() + 1;
  const Communicator::Impl& impl = CommunicatorParts::impl_of(parent);
  check_usable(impl, "split");
  check_has_peers(parent, "split", "use new_group(), which gets the ranks as a list");
  NewGroup group{.name = options.name, .identity = impl.identity.child(number, options.color)};
  SplitCall call = call_of(options);
  const std::vector<int> all = all_ranks(impl);
  const Status cut = options.color ? cut_into(impl, all, group, call) : Status();
  const std::vector<SplitCall> calls =
      gather(parent, "split", call, options.color ? std::optional(group.identity) : std::nullopt,
             deadline);
  try {
    check_memory(impl, cut, std::span<const SplitCall>(calls), all);
    check_names(parent, calls);
  } catch (const Error&) {
    if (group.pieces) group.pieces->discard();
    throw;
  }
  if (!options.color) return nullptr;
  for (int rank = 0; rank < parent.world_size(); ++rank) {
    if (calls[static_cast<size_t>(rank)].is_of(*options.color)) group.members.push_back(rank);
  }
  std::stable_sort(group.members.begin(), group.members.end(), [&calls](int a, int b) {
    return calls[static_cast<size_t>(a)].key < calls[static_cast<size_t>(b)].key;
  });
  for (const int member : group.members) {
    group.places.push_back(calls[static_cast<size_t>(member)].places);
  }
  if (group.name.empty()) group.name = format("{}/{}.{}", parent.name(), number, *options.color);
  return make_group(impl, std::move(group), deadline);
}

std::unique_ptr<Communicator> new_group(Communicator& parent, std::span<const Rank> ranks,
                                        Deadline deadline, const std::string& name) {
  check_list("new_group", parent, ranks);
  const uint64_t number = parent.num_collectives() + 1;
  const Communicator::Impl& impl = CommunicatorParts::impl_of(parent);
  check_usable(impl, "new_group");
  const bool is_member = std::ranges::find(ranks, parent.rank()) != ranks.end();
  NewGroup group{.name = name.empty() ? format("{}/{}", parent.name(), number) : name,
                 .identity = impl.identity.child(number)};
  NewGroupCall call{.digest = digest_of_ranks(fabric_ranks(impl, ranks)),
                    .name_digest = fnv1a(name)};
  const Status cut = is_member ? cut_into(impl, values_of(ranks), group, call) : Status();
  const auto calls = gather(parent, "new_group", call,
                            is_member ? std::optional(group.identity) : std::nullopt, deadline);
  const auto other = std::ranges::find_if(
      calls, [&](const NewGroupCall& theirs) { return theirs.digest != call.digest; });
  const auto other_name = std::ranges::find_if(
      calls, [&](const NewGroupCall& theirs) { return theirs.name_digest != call.name_digest; });
  try {
    if (other != calls.end()) refuse_list(parent, ranks, static_cast<int>(other - calls.begin()));
    if (other_name != calls.end()) {
      throw refusal_of(parent, "new_group",
                       format("this rank names the group \"{}\", but rank {} gives another name: "
                              "every rank must pass the same name",
                              name, other_name - calls.begin()));
    }
    check_memory(impl, cut, std::span<const NewGroupCall>(calls), all_ranks(impl));
  } catch (const Error&) {
    if (group.pieces) group.pieces->discard();
    throw;
  }
  if (!is_member) return nullptr;
  group.members = values_of(ranks);
  for (const int member : group.members) {
    group.places.push_back(calls[static_cast<size_t>(member)].places);
  }
  return make_group(impl, std::move(group), deadline);
}

}  // namespace cadre
