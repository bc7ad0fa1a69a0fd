#include "cadre/collective/host/symmetric_segments.h"

#include <algorithm>
#include <functional>

#include "cadre/base/format.h"

namespace cadre::host {

void SymmetricSegments::add(SymmetricSegment segment) {
  const size_t needed = segment.bytes_per_rank * static_cast<size_t>(world_size_);
  if (segment.id == 0 || segment.memory == nullptr || segment.memory->bytes().size() < needed) {
    throw Error(ErrorCode::kInvalidArgument,
                format("symmetric segment {}: an id above 0 and {} bytes ({} for each of {} ranks) "
                       "are needed",
                       segment.id, needed, segment.bytes_per_rank, world_size_));
  }
  const std::lock_guard lock(mutex_);
  for (const SymmetricSegment& known : segments_) {
    if (known.id == segment.id) {
      throw Error(ErrorCode::kInvalidArgument,
                  format("symmetric segment {} is registered already", segment.id));
    }
  }
  segments_.push_back(std::move(segment));
}

void SymmetricSegments::remove(uint32_t id) {
  std::shared_ptr<os::SharedMemory> last;  // unmapped after the lock
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(segments_.begin(), segments_.end(),
                                  [id](const SymmetricSegment& known) { return known.id == id; });
  if (found == segments_.end()) return;
  last = std::move(found->memory);
  segments_.erase(found);
}

SymmetricPlace SymmetricSegments::find(ConstBytes buffer, Rank rank) const {
  const std::less_equal<const std::byte*> is_before;
  const std::lock_guard lock(mutex_);
  for (const SymmetricSegment& known : segments_) {
    const std::byte* begin =
        known.memory->bytes().data() + known.bytes_per_rank * static_cast<size_t>(rank.value);
    if (is_before(begin, buffer.data()) &&
        is_before(buffer.data() + buffer.size(), begin + known.bytes_per_rank)) {
      return {.segment = known.id, .offset = static_cast<uint64_t>(buffer.data() - begin)};
    }
  }
  return {};
}

std::optional<SymmetricSegment> SymmetricSegments::get(uint32_t id) const {
  const std::lock_guard lock(mutex_);
  for (const SymmetricSegment& known : segments_) {
    if (known.id == id) return known;
  }
  return std::nullopt;
}

}  // namespace cadre::host
