// The layout of the memory through which the ranks of a host group talk.
//
// Threads: a plain view; who may touch what, and when, is said at each part. Blocking: never.
// Lifetime: borrows the mapping. The segment is zeroed at creation, which is a valid first state,
// so no rank initialises it and all may start at once.
//
//   notice     one line for the group: "two ranks have called different operations", "a rank has
//              left an operation with an error"
//   per rank   two entries    what the rank called: number, fingerprint, and a small payload
//              one step word  how far it is in an operation of several steps
//              two flat slots payload of medium operations
//              staging        payload of large operations, in chunks
//
// Each part has one writer, its rank. Entries and flat slots alternate by the parity of the round:
// a rank writes those of round n + 2 only after it has seen everybody's entry of round n + 1, and a
// rank publishes that only when it has read everything of round n.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cadre/base/fingerprint.h"
#include "cadre/base/types.h"
#include "cadre/collective/host/buffers.h"
#include "cadre/os/wait_word.h"

namespace cadre::host {

// Two cache lines: CPUs fetch neighbouring lines in pairs.
inline constexpr size_t kFlagAlignment = 128;
inline constexpr size_t kInlineBytes = 96;
inline constexpr size_t kFlatBytes = 32 << 10;
inline constexpr size_t kChunkBytes = 512 << 10;
// What the pipelines of staged.cpp count on: a rank may be three chunks ahead of its last reader.
inline constexpr int kNumChunks = 4;

// A rank's announcement of an operation. Payload and flag share their lines, so a small operation
// costs one transfer between cores.
struct alignas(kFlagAlignment) Entry {
  os::WaitWord round;  // published last
  uint64_t number;
  Fingerprint fingerprint;
  std::array<std::byte, kInlineBytes> payload;
};
static_assert(sizeof(Entry) == kFlagAlignment);

struct alignas(kFlagAlignment) StepFlag {
  os::WaitWord step;
};

struct alignas(kFlagAlignment) Notice {
  // Set by the rank that sees two ranks call different operations: bit 32, and the round in the low
  // bits.
  std::atomic<uint64_t> mismatch;
  // Set by the first rank that leaves an operation with an error: bit 63, the rank from bit 32 on,
  // and the round in the low bits.
  std::atomic<uint64_t> left;
};

class Arena {
 public:
  static size_t bytes(int world_size);

  // What a rank writes in small operations: the notice, and its own entries, step and flat slots.
  static std::array<Range, 2> small_parts(Rank rank);
  // What it writes in addition when a large operation goes through the staging.
  static Range staging_part(Rank rank);

  // REQUIRES: memory.size() >= bytes(world_size), page-aligned, zeroed before the first use.
  Arena(Bytes memory, int world_size);

  Notice& notice() const;
  Entry& entry(Rank rank, uint32_t round) const;
  StepFlag& step_flag(Rank rank) const;
  std::byte* flat(Rank rank, uint32_t round) const;
  std::byte* chunk(Rank rank, size_t index) const;  // modulo kNumChunks

 private:
  std::byte* block(Rank rank) const;

  std::byte* base_;
};

}  // namespace cadre::host
