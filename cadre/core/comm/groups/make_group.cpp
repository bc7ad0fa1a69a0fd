#include "cadre/core/comm/groups/make_group.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "cadre/core/base/fnv1a.h"
#include "cadre/core/comm/checks.h"

namespace cadre {

Status cut_pieces(const Communicator::Impl& parent, const std::vector<int>& candidates,
                  NewGroup& group) {
  const Fabric& fabric = *parent.fabric;
  if (fabric.host_memory() == nullptr || parent.options.transport == TransportChoice::kTcp) {
    return {};
  }
  std::vector<int> neighbours;
  for (const int candidate : candidates) {
    const int rank = parent.members.ranks[static_cast<size_t>(candidate)];
    if (fabric.share_memory({&rank, 1})) neighbours.push_back(rank);
  }
  if (neighbours.size() < 2) return {};
  auto pieces = GroupPieces::cut(*fabric.host_memory(), fabric.slots_of(neighbours));
  if (!pieces.ok()) return pieces.error();
  group.pieces = std::move(pieces).value();
  return {};
}

std::unique_ptr<Communicator> make_group(const Communicator::Impl& parent, NewGroup group,
                                         Deadline deadline) {
  const auto self = std::ranges::find(group.members, parent.rank.value);
  GroupMembers members;
  for (const int member : group.members) {
    members.ranks.push_back(parent.members.ranks[static_cast<size_t>(member)]);
  }
  members.self = static_cast<int>(self - group.members.begin());
  members.membership = parent.members.membership;
  members.membership.rank = members.self;
  members.membership.world_size = static_cast<int>(members.ranks.size());
  members.membership.group = group.identity.unique_name();
  // The wills, by which the store reports dead ranks, are registered under the ranks of the parent.
  members.membership.forget_numbers_of_job();
  members.creation = group.creation;
  CommunicatorOptions options = parent.options;
  options.name = group.name;
  options.id = group.identity.id();
  options.flight_record_path = parent.fabric->flight_files().path_for(group.identity, group.name);
  auto impl = std::make_unique<Communicator::Impl>(parent.fabric, options, group.identity,
                                                   std::move(members));
  try {
    if (group.pieces && impl->uses_host_memory()) {
      group.pieces->keep_holders(impl->local_slots());
    } else if (group.pieces) {
      group.pieces->discard();
      group.pieces.reset();
    }
    impl->open(std::move(group.pieces), group.places, deadline);
  } catch (const std::exception& thrown) {
    impl->give_up(thrown, "making the group");
    throw;
  }
  return std::make_unique<Communicator>(std::move(impl));
}

std::string list_of(std::span<const Rank> ranks) {
  std::string text;
  for (const Rank rank : ranks) text += format("{}{}", text.empty() ? "" : ", ", rank);
  return format("[{}]", text);
}

void check_list(std::string_view call, const Communicator& parent, std::span<const Rank> ranks) {
  if (ranks.empty()) throw refusal_of(parent, call, "the list of ranks is empty");
  std::vector<bool> is_named(static_cast<size_t>(parent.world_size()));
  for (const Rank rank : ranks) {
    if (rank < 0 || rank >= parent.world_size()) {
      throw refusal_of(parent, call,
                       format("rank {} of the list {} is not in the group of {} ranks", rank,
                              list_of(ranks), parent.world_size()));
    }
    if (is_named[static_cast<size_t>(rank.value)]) {
      throw refusal_of(parent, call,
                       format("rank {} is in the list {} twice", rank, list_of(ranks)));
    }
    is_named[static_cast<size_t>(rank.value)] = true;
  }
}

std::vector<int> values_of(std::span<const Rank> ranks) {
  std::vector<int> values;
  for (const Rank rank : ranks) values.push_back(rank.value);
  return values;
}

std::vector<int> fabric_ranks(const Communicator::Impl& parent, std::span<const Rank> ranks) {
  std::vector<int> values;
  for (const Rank rank : ranks) {
    values.push_back(parent.members.ranks[static_cast<size_t>(rank.value)]);
  }
  return values;
}

uint64_t digest_of_ranks(std::span<const int> ranks) {
  Fnv1a hash;
  for (const int rank : ranks) hash.add(static_cast<uint64_t>(rank));
  return hash.value();
}

Error error_of_rank(const Communicator::Impl& group, ErrorCode code, int culprit,
                    std::string message) {
  return Error(code, std::move(message))
      .with_details({.culprit = Rank(culprit),
                     .culprit_world_rank = Rank(group.monitor->roster().world_rank(culprit))});
}

void tell_giving_up(const Communicator::Impl& group, const GroupIdentity& identity,
                    const Error& error) {
  if (group.fabric->plane() == nullptr) return;
  const int self = group.fabric->rank().value;
  const int culprit = group.culprit_of(error).value;
  const std::string cause =
      format("{} gave up making the group: {}", group.monitor->roster().describe(group.rank.value),
             error.message());
  group.fabric->plane()->tell_failure(
      {identity.key(), self,
       wire::AbortNotice{error.code(), group.members.ranks[static_cast<size_t>(culprit)], self,
                         cause, cause}});
}

void check_failure(const Communicator::Impl& group) {
  if (group.monitor->has_failed()) throw group.monitor->error();
}

void check_usable(const Communicator::Impl& group, std::string_view call) {
  group.check_open(call);
  check_failure(group);
}

}  // namespace cadre
