// The layout of the memory through which the ranks of a host group communicate: one block for each
// rank, anywhere in the memory that they share.
//
// Threads: a plain view; the last paragraph says which rank may write which part, and when.
// Blocking: never. Lifetime: borrows the blocks. A rank zeroes its block before other ranks see it.
// Zeroes are a valid first state, so a rank may start before the others have done anything.
//
//   flags      two entries    the operation that the rank called, and a small payload
//              one step word  the step that the rank has reached in an operation
//              notice         in rank 0's block, for all ranks: "two ranks have called different
//                             operations", "a rank has left an operation with an error"
//   flat       two slots      payload of medium operations
//   staging    chunks         payload of large operations
//
// Each part except the notice is written by its own rank only. A rank has two entries and two flat
// slots, and uses them in turn: the sequence number, which counts the operations that the rank has
// announced, selects one by its parity. This is safe: a rank writes the entry and the slot of
// number n + 2 only after it has seen entry n + 1 of every rank, and a rank publishes entry n + 1
// only after it has read everything of number n.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cadre/core/base/fingerprint.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/host/buffers.h"
#include "cadre/core/os/wait_word.h"

namespace cadre::host {

// The alignment of flags: two cache lines, because CPUs fetch neighbouring lines in pairs.
inline constexpr size_t kFlagAlignment = 128;
inline constexpr size_t kInlineBytes = 96;
inline constexpr size_t kFlatBytes = 32 << 10;
inline constexpr size_t kChunkBytes = 512 << 10;
// The number of chunk buffers of a rank in the pipelines of staged.cpp. So a rank may be three
// chunks ahead of the slowest rank that reads its data.
inline constexpr int kNumChunks = 4;

// A rank's announcement of an operation. Payload and sequence number share two cache lines, so a
// small operation costs one transfer between cores.
struct alignas(kFlagAlignment) Entry {
  // The number of this entry; the rank writes it last, which publishes the entry.
  os::WaitWord sequence;
  uint64_t number;
  Fingerprint fingerprint;
  std::array<std::byte, kInlineBytes> payload;
};
static_assert(sizeof(Entry) == kFlagAlignment);

struct alignas(kFlagAlignment) StepFlag {
  os::WaitWord step;
};

struct alignas(kFlagAlignment) Notice {
  // Set by a rank that detects that two ranks called different operations: bit 32 is 1, and the low
  // 32 bits are the sequence number of these operations.
  std::atomic<uint64_t> mismatch;
  // Set by the first rank that leaves an operation with an error: bit 63 is 1, the bits from 32 on
  // are the rank, and the low 32 bits are the sequence number of the operation.
  std::atomic<uint64_t> left;
};

class Arena {
 public:
  static constexpr size_t block_bytes() { return kBlockBytes; }

  // The parts of a block: flags for every operation, flat slots for medium ones, and staging for
  // large operations on buffers that peers cannot map.
  static constexpr Range flags_part() { return {0, kPage}; }
  static constexpr Range flat_part() { return {kFlatOffset, 2 * kFlatBytes}; }
  static constexpr Range staging_part() { return {kChunkOffset, kNumChunks * kChunkBytes}; }

  // blocks[r] is the block of rank r, which is aligned to pages.
  explicit Arena(std::vector<std::byte*> blocks) : blocks_(std::move(blocks)) {}

  Notice& notice() const { return *reinterpret_cast<Notice*>(block(0) + kNoticeOffset); }
  Entry& entry(Rank rank, uint32_t sequence) const {
    return reinterpret_cast<Entry*>(block(rank) + kEntryOffset)[sequence % 2];
  }
  StepFlag& step_flag(Rank rank) const {
    return *reinterpret_cast<StepFlag*>(block(rank) + kStepOffset);
  }
  std::byte* flat(Rank rank, uint32_t sequence) const {
    return block(rank) + kFlatOffset + (sequence % 2) * kFlatBytes;
  }
  // Returns the memory of chunk `index` of an operation. The chunks use kNumChunks buffers in turn.
  std::byte* chunk(Rank rank, size_t index) const {
    return block(rank) + kChunkOffset + (index % kNumChunks) * kChunkBytes;
  }

 private:
  // The first page of a block has only the flags. Flat slots and staging follow on later pages.
  static constexpr size_t kPage = 4096;
  static constexpr size_t kEntryOffset = 0;
  static constexpr size_t kStepOffset = kEntryOffset + 2 * sizeof(Entry);
  static constexpr size_t kNoticeOffset = kStepOffset + sizeof(StepFlag);
  static constexpr size_t kFlatOffset = kPage;
  static constexpr size_t kChunkOffset = kFlatOffset + 2 * kFlatBytes;
  static constexpr size_t kBlockBytes = kChunkOffset + kNumChunks * kChunkBytes;
  static_assert(kNoticeOffset + sizeof(Notice) <= kPage && kBlockBytes % kPage == 0);

  std::byte* block(Rank rank) const { return blocks_[static_cast<size_t>(rank.value)]; }

  std::vector<std::byte*> blocks_;
};

}  // namespace cadre::host
