// What tells a group from every other one: its id, which people read and which may repeat, and its
// birth number, which never does.
//
// Threads: a plain value. Blocking: never. Errors: none.
// Keys of the control plane, streams, keys in the store and names of files are derived from a
// GroupIdentity and from nothing else. A birth number is derived from the random number of the
// fabric (Fabric::connection_number()), which all its ranks know, and from what tells the group
// from the other groups of the fabric: so its members agree on it without a message of their own.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cadre/core/fabric/plane/group_events.h"
#include "cadre/core/transport/stream_id.h"

namespace cadre {

class GroupIdentity {
 public:
  // The group of all ranks of a fabric.
  static GroupIdentity of_connection(std::string id, uint64_t connection);
  // What the members of a group that they create over a store know before the exchange: failures of
  // the creation are reported to it.
  static GroupIdentity of_creation(std::string id, uint64_t connection,
                                   std::span<const int> members);
  // The group that comes out of it; `stamps` are the random numbers of the members' calls.
  GroupIdentity created(std::span<const uint64_t> stamps) const;
  // A group that operation `number` of this one creates.
  GroupIdentity child(uint64_t number, std::optional<int> color = {}) const;

  // "world", "world/2.0".
  const std::string& id() const { return id_; }
  // "world/2.0@0123456789abcdef": for keys of stores.
  std::string unique_name() const;
  // For files of the group, with letters, digits and "-_.@" only: "NAME@0123456789abcdef".
  std::string file_name(std::string_view name) const;
  GroupKey key() const { return key_; }
  StreamId stream(uint8_t purpose) const { return {key_, purpose}; }

  friend bool operator==(const GroupIdentity&, const GroupIdentity&) = default;

 private:
  GroupIdentity(std::string id, uint64_t birth);

  std::string id_;
  uint64_t birth_;
  GroupKey key_;
};

// The name under which the ranks of a membership connect a group of that id: part of its keys in
// the store and of its proofs, and the Membership::group of its survivors. The id itself, but for a
// group whose membership is that of another group.
std::string connection_name(std::string_view membership_group, std::string_view id);

}  // namespace cadre
