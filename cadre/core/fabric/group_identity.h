// Identifies a group by its id, a readable name that two groups may share, and by its birth number,
// which is unique.
//
// Threads: a plain value. Blocking: never. Errors: none.
// Keys of the control plane, ids of streams, keys in the store and names of files are derived from
// a GroupIdentity alone. A birth number is derived from the random number of the fabric
// (Fabric::connection_number()), which all its ranks know, and from values that distinguish the
// group from the other groups of the fabric. So the members compute equal birth numbers without
// exchanging a message.
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
  // Returns the identity of the group of all ranks of a fabric.
  static GroupIdentity of_connection(std::string id, uint64_t connection);
  // Returns the identity that members of a group know while they create it over a store, before
  // they have exchanged random numbers. Failures of the creation are reported under this identity.
  static GroupIdentity of_creation(std::string id, uint64_t connection,
                                   std::span<const int> members);
  // Returns the identity of the created group. REQUIRES: *this is a result of of_creation().
  // `stamps` has a random number from each member.
  GroupIdentity created(std::span<const uint64_t> stamps) const;
  // Returns the identity of a group that operation `number` of this group creates.
  GroupIdentity child(uint64_t number, std::optional<int> color = {}) const;

  // Returns a text such as "world" or "world/2.0".
  const std::string& id() const { return id_; }
  // Returns a text such as "world/2.0@0123456789abcdef", which is used in keys of stores.
  std::string unique_name() const;
  // Returns a text such as "NAME@0123456789abcdef", with letters, digits and "-_.@" only, which is
  // used for files of the group.
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

// Returns the name with which the ranks of a membership connect a group with this id. The name is
// part of the keys in the store and of the proofs in handshakes, and is the Membership::group after
// a rejoin. It is `membership_group` if that equals the id or is the id with a birth number; else
// the id with a hash of both arguments.
std::string connection_name(std::string_view membership_group, std::string_view id);

}  // namespace cadre
