#include "cadre/collective/host/arena.h"

#include "cadre/base/error.h"
#include "cadre/base/format.h"

namespace cadre::host {
namespace {

constexpr size_t kPage = 4096;

// Flags and payload stand in pages of their own.
constexpr size_t kEntryOffset = 0;
constexpr size_t kStepOffset = kEntryOffset + 2 * sizeof(Entry);
constexpr size_t kFlatOffset = kPage;
constexpr size_t kChunkOffset = kFlatOffset + 2 * kFlatBytes;
constexpr size_t kRankBytes = kChunkOffset + kNumChunks * kChunkBytes;
static_assert(kStepOffset + sizeof(StepFlag) <= kPage && kRankBytes % kPage == 0);

}  // namespace

size_t Arena::bytes(int world_size) {
  return kPage + static_cast<size_t>(world_size) * kRankBytes;
}

std::array<Range, 2> Arena::small_parts(Rank rank) {
  const size_t block = kPage + static_cast<size_t>(rank.value) * kRankBytes;
  return {Range{0, kPage}, Range{block, kChunkOffset}};
}

Range Arena::staging_part(Rank rank) {
  const size_t block = kPage + static_cast<size_t>(rank.value) * kRankBytes;
  return {block + kChunkOffset, kNumChunks * kChunkBytes};
}

Arena::Arena(Bytes memory, int world_size) : base_(memory.data()) {
  if (memory.size() < bytes(world_size)) {
    throw Error(ErrorCode::kInternal, format("host arena: {} bytes for {} ranks, {} are needed",
                                             memory.size(), world_size, bytes(world_size)));
  }
}

std::byte* Arena::block(Rank rank) const {
  return base_ + kPage + static_cast<size_t>(rank.value) * kRankBytes;
}

Notice& Arena::notice() const {
  return *reinterpret_cast<Notice*>(base_);
}

Entry& Arena::entry(Rank rank, uint32_t round) const {
  return reinterpret_cast<Entry*>(block(rank) + kEntryOffset)[round % 2];
}

StepFlag& Arena::step_flag(Rank rank) const {
  return *reinterpret_cast<StepFlag*>(block(rank) + kStepOffset);
}

std::byte* Arena::flat(Rank rank, uint32_t round) const {
  return block(rank) + kFlatOffset + (round % 2) * kFlatBytes;
}

std::byte* Arena::chunk(Rank rank, size_t index) const {
  return block(rank) + kChunkOffset + (index % kNumChunks) * kChunkBytes;
}

}  // namespace cadre::host
