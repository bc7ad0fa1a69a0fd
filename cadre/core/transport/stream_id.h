// The id of a byte stream. Streams of several groups share the connections between two processes.
//
// Threads: plain values. Blocking: never.
#pragma once

#include <compare>
#include <cstdint>

namespace cadre {

// Created by GroupIdentity::stream(). All members of a group have the same id, and no other group
// has it.
struct StreamId {
  uint64_t group = 0;
  uint8_t purpose = 0;  // whether the stream carries the group's collectives or its messages

  friend auto operator<=>(const StreamId&, const StreamId&) = default;
};

inline constexpr uint8_t kCollectivePurpose = 1;
inline constexpr uint8_t kMessagePurpose = 2;

}  // namespace cadre
