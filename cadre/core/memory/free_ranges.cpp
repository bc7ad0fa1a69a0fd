#include "cadre/core/memory/free_ranges.h"

#include <algorithm>

namespace cadre {

FreeRanges::FreeRanges(size_t num_bytes) : num_bytes_(num_bytes) {
  if (num_bytes > 0) sizes_.emplace(0, num_bytes);
}

std::optional<size_t> FreeRanges::take(size_t num_bytes) {
  for (auto at = sizes_.begin(); at != sizes_.end(); ++at) {
    const auto [begin, size] = *at;
    if (size < num_bytes) continue;
    sizes_.erase(at);
    if (size > num_bytes) sizes_.emplace(begin + num_bytes, size - num_bytes);
    num_bytes_ -= num_bytes;
    return begin;
  }
  return std::nullopt;
}

void FreeRanges::give(const ByteRange& range) {
  auto at = sizes_.emplace(range.begin, range.size).first;
  num_bytes_ += range.size;
  if (const auto next = std::next(at);
      next != sizes_.end() && at->first + at->second == next->first) {
    at->second += next->second;
    sizes_.erase(next);
  }
  if (at == sizes_.begin()) return;
  const auto previous = std::prev(at);
  if (previous->first + previous->second != at->first) return;
  previous->second += at->second;
  sizes_.erase(at);
}

size_t FreeRanges::longest() const {
  size_t longest = 0;
  for (const auto& [begin, size] : sizes_) longest = std::max(longest, size);
  return longest;
}

}  // namespace cadre
