// The number of bytes that each rank sends to each other rank in an all_to_all_v, in one row for
// each rank.
//
// Threads: one at a time. Blocking: never. Lifetime: a value. Errors: check() returns
// kInvalidArgument and names two ranks in OpProgress::part_mismatch; ranks with equal tables name
// the same two ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/collective.h"
#include "cadre/core/collective/op.h"

namespace cadre {

class PartTable {
 public:
  // A row: the bytes that the rank sends to each rank, then the bytes that it expects from each.
  static size_t row_bytes(int world_size);

  explicit PartTable(int world_size);

  int world_size() const { return world_size_; }
  // All rows in rank order, which the ranks exchange as bytes.
  Bytes bytes() { return std::as_writable_bytes(std::span(cells_)); }
  Bytes row(Rank rank);
  void set_row(Rank rank, const PartSizes& sizes);

  std::span<const uint64_t> sent(Rank rank) const;
  std::span<const uint64_t> received(Rank rank) const;
  uint64_t longest_part() const;
  uint64_t most_sent() const;  // the most bytes that one rank sends, to all ranks together

  // Returns an error unless every rank expects what is sent to it.
  Status check(const OpContext& op) const;

 private:
  int world_size_;
  std::vector<uint64_t> cells_;
};

}  // namespace cadre
