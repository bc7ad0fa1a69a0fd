#include "cadre/comm/groups/make_group.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <utility>

#include "cadre/base/format.h"

namespace cadre {
namespace {

// Beside the parent's record: one file for each group that the rank is in.
std::string record_path(const Communicator::Impl& parent, const GroupLabel& label, Rank rank) {
  const std::string& parent_path = parent.options.flight_record_path;
  if (parent_path.empty()) return "";
  std::string group = label.name == label.id ? label.id : format("{}@{}", label.name, label.id);
  std::replace(group.begin(), group.end(), '/', '.');
  const std::string file =
      format("{}-round{}-rank{}.flight", group, parent.members.membership.round, rank);
  return (std::filesystem::path(parent_path).parent_path() / file).string();
}

}  // namespace

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

std::unique_ptr<Communicator> make_group(const Communicator::Impl& parent, NewGroup group) {
  const auto self = std::ranges::find(group.members, parent.rank.value);
  GroupMembers members;
  for (const int member : group.members) {
    members.ranks.push_back(parent.members.ranks[static_cast<size_t>(member)]);
  }
  members.self = static_cast<int>(self - group.members.begin());
  members.membership = parent.members.membership;
  members.membership.rank = members.self;
  members.membership.world_size = static_cast<int>(members.ranks.size());
  members.membership.job_size = 0;  // the wills are those of the parent's ranks
  CommunicatorOptions options = parent.options;
  options.name = group.label.name;
  options.id = group.label.id;
  options.flight_record_path = record_path(parent, group.label, members.self);
  auto impl = std::make_unique<Communicator::Impl>(parent.fabric, options, std::move(members));
  try {
    if (group.pieces && impl->uses_host_memory()) {
      group.pieces->keep_holders(parent.fabric->slots_of(impl->members.ranks));
    } else if (group.pieces) {
      group.pieces->discard();
      group.pieces.reset();
    }
    impl->open(std::move(group.pieces), group.places);
  } catch (const std::exception& thrown) {
    impl->give_up(thrown, "making the group");
    throw;
  }
  return std::make_unique<Communicator>(std::move(impl));
}

}  // namespace cadre
