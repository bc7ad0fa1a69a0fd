// The free parts of a rank's slice: whole pages, neighbours joined.
//
// Threads: one at a time. Blocking: never. Lifetime: a plain value. Errors: none; take() returns
// nullopt if no part is long enough.
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

  // Takes the first part that is long enough, so that low pages are reused and high ones stay
  // unused.
  std::optional<size_t> take(size_t num_bytes);
  // REQUIRES: the range was taken.
  void give(const ByteRange& range);

  size_t num_bytes() const { return num_bytes_; }
  size_t longest() const;

 private:
  // The sizes of the free parts; the key is the offset at which a part begins.
  std::map<size_t, size_t> sizes_;
  size_t num_bytes_;
};

}  // namespace cadre
