#include "cadre/core/collective/part_table.h"

#include <algorithm>
#include <numeric>

#include "cadre/core/base/format.h"

namespace cadre {

size_t PartTable::row_bytes(int world_size) {
  return 2 * static_cast<size_t>(world_size) * sizeof(uint64_t);
}

PartTable::PartTable(int world_size)
    : world_size_(world_size),
      cells_(2 * static_cast<size_t>(world_size) * static_cast<size_t>(world_size)) {}

Bytes PartTable::row(Rank rank) {
  const size_t size = row_bytes(world_size_);
  return bytes().subspan(static_cast<size_t>(rank.value) * size, size);
}

void PartTable::set_row(Rank rank, const PartSizes& sizes) {
  const auto cells = std::span(cells_).subspan(2 * static_cast<size_t>(rank.value) *
                                               static_cast<size_t>(world_size_));
  std::ranges::copy(sizes.sent, cells.begin());
  std::ranges::copy(sizes.received, cells.begin() + world_size_);
}

std::span<const uint64_t> PartTable::sent(Rank rank) const {
  const auto size = static_cast<size_t>(world_size_);
  return std::span(cells_).subspan(2 * size * static_cast<size_t>(rank.value), size);
}

std::span<const uint64_t> PartTable::received(Rank rank) const {
  const auto size = static_cast<size_t>(world_size_);
  return std::span(cells_).subspan(size * (2 * static_cast<size_t>(rank.value) + 1), size);
}

uint64_t PartTable::longest_part() const {
  return cells_.empty() ? 0 : *std::ranges::max_element(cells_);
}

uint64_t PartTable::most_sent() const {
  uint64_t most = 0;
  for (int rank = 0; rank < world_size_; ++rank) {
    const auto parts = sent(rank);
    most = std::max(most, std::accumulate(parts.begin(), parts.end(), uint64_t{0}));
  }
  return most;
}

Status PartTable::check(const OpContext& op) const {
  for (int sender = 0; sender < world_size_; ++sender) {
    for (int receiver = 0; receiver < world_size_; ++receiver) {
      const uint64_t sent_bytes = sent(sender)[static_cast<size_t>(receiver)];
      const uint64_t expected_bytes = received(receiver)[static_cast<size_t>(sender)];
      if (sent_bytes == expected_bytes) continue;
      op.progress.part_mismatch = {sender, receiver, sent_bytes, expected_bytes};
      return Error(ErrorCode::kInvalidArgument,
                   format("{} #{}: rank {} sends {} bytes to rank {}, which expects {}",
                          OpDescriptor::from_fingerprint(op.fingerprint()).to_string(), op.number,
                          sender, sent_bytes, receiver, expected_bytes));
    }
  }
  return {};
}

}  // namespace cadre
