// The buffers of an operation of the host engine, and how its work is divided into parts.
//
// Threads: plain values. Blocking: never. Lifetime: borrows the buffers. Errors: none.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "cadre/core/base/types.h"
#include "cadre/core/collective/reduce.h"
#include "cadre/core/memory/place.h"

namespace cadre::host {

struct Buffers {
  ConstBytes in;
  Bytes out;
};

using Range = ByteRange;

constexpr size_t divide_rounding_up(size_t a, size_t b) {
  return (a + b - 1) / b;
}

// The ranges of the ranks' parts in the output of a gather, or in the input of a reduce_scatter.
class RankParts {
 public:
  // Makes equal parts, in rank order.
  explicit RankParts(size_t each) : each_(each) {}
  // parts[r] is the part of rank r.
  explicit RankParts(std::vector<Range> parts) : parts_(std::move(parts)) {}

  Range of(int rank) const {
    const auto index = static_cast<size_t>(rank);
    return parts_.empty() ? Range{index * each_, each_} : parts_[index];
  }
  size_t longest() const {
    size_t longest = each_;
    for (const Range& part : parts_) longest = std::max(longest, part.size);
    return longest;
  }

 private:
  size_t each_ = 0;
  std::vector<Range> parts_;
};

// How an all_to_all divides the buffers of one rank.
struct ExchangeParts {
  std::vector<Range> sent;      // sent[r] is the range of the input that goes to rank r
  std::vector<Range> received;  // received[r] is the range of the output that comes from rank r
  size_t longest = 0;           // the size in bytes of the longest part between any two ranks
};

// Returns the range of part `index` when `total` bytes are cut into parts of `part` bytes each; the
// last parts may be short or empty.
constexpr Range part_of(size_t total, size_t part, size_t index) {
  const size_t begin = std::min(total, index * part);
  return {begin, std::min(part, total - begin)};
}

// Returns the size of the part of `total` bytes that each rank works on, in whole cache lines. So
// no two ranks write to the same line, and no element is split.
constexpr size_t owned_bytes(size_t total, int num_ranks) {
  constexpr size_t kLine = 64;
  const size_t share = divide_rounding_up(total, static_cast<size_t>(num_ranks));
  return divide_rounding_up(share, kLine) * kLine;
}

}  // namespace cadre::host
