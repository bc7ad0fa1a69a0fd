// The name of one stream of bytes among those that share the connections between two processes.
//
// Threads: plain values. Blocking: never.
#pragma once

#include <compare>
#include <cstdint>

namespace cadre {

// Made by GroupIdentity::stream(). The id is equal on all members of a group and differs from the
// ids of all other groups.
struct StreamId {
  uint64_t group = 0;
  uint8_t purpose = 0;  // whether the stream carries the group's collectives or its messages

  friend auto operator<=>(const StreamId&, const StreamId&) = default;
};

inline constexpr uint8_t kCollectivePurpose = 1;
inline constexpr uint8_t kMessagePurpose = 2;

}  // namespace cadre
