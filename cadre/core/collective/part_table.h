// Who sends how many bytes to whom in an all_to_all_v: a row for each rank, as all ranks see it.
//
// Threads: one at a time. Blocking: never. Lifetime: a value.
// Errors: check() gives kInvalidArgument and names the two ranks in OpProgress::part_mismatch; all
// ranks that hold the same table name the same two.
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
  // A row: what the rank sends to each, then what it expects from each, in bytes.
  static size_t row_bytes(int world_size);

  explicit PartTable(int world_size);

  int world_size() const { return world_size_; }
  // All rows in rank order, to be exchanged as bytes.
  Bytes bytes() { return std::as_writable_bytes(std::span(cells_)); }
  Bytes row(Rank rank);
  void set_row(Rank rank, const PartSizes& sizes);

  std::span<const uint64_t> sent(Rank rank) const;
  std::span<const uint64_t> received(Rank rank) const;
  uint64_t longest_part() const;
  uint64_t most_sent() const;  // by one rank in all

  // Whether everybody expects what is sent.
  Status check(const OpContext& op) const;

 private:
  int world_size_;
  std::vector<uint64_t> cells_;
};

}  // namespace cadre
