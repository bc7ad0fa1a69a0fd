// The free ranges of one rank's slice of the shared segment, in whole pages. Adjacent free ranges
// are merged.
//
// Threads: one at a time. Lifetime: a plain value. Errors: none; take() returns nullopt if no free
// range is long enough.
#pragma once

#include <cstddef>
#include <map>
#include <optional>

#include "cadre/core/base/export.h"
#include "cadre/core/memory/place.h"

namespace cadre {

class CADRE_EXPORT FreeRanges {
 public:
  explicit FreeRanges(size_t num_bytes);

  // Allocates at the first free range that is long enough (first fit), so that pages at low offsets
  // are reused and those at high offsets stay unused. Returns the offset.
  std::optional<size_t> take(size_t num_bytes);
  // Frees a range. REQUIRES: take() has allocated it.
  void give(const ByteRange& range);

  size_t num_bytes() const { return num_bytes_; }
  size_t longest() const;

 private:
  // The sizes of the free ranges; the key is the offset at which a range begins.
  std::map<size_t, size_t> sizes_;
  size_t num_bytes_;
};

}  // namespace cadre
