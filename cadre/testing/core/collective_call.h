// Describes a call of any collective as a value: the number of elements that each rank sends and
// receives, the Collective over given buffers, and the source of each element of the result. So
// tests of all collectives are written once.
//
// Errors: kInternal for an OpKind that is not a collective.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "cadre/core/base/types.h"
#include "cadre/core/collective/collective.h"

namespace cadre::testing {

// Consecutive elements of a result that have one source.
struct OutputPiece {
  // The rank from whose input these elements are copied; nullopt if they are the reduction of all
  // inputs.
  std::optional<int> from;
  uint64_t begin = 0;  // index of the first element in that input
  uint64_t count = 0;
};

struct CollectiveCall {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUint8;
  uint64_t count = 0;  // elements of one rank's part
  Rank root = 0;
  Reduction reduction = {};
  int world_size = 1;
  // parts(from, to) is the number of elements that one rank sends to another in all_to_all_v. For
  // all_gather_v and reduce_scatter_v, parts(rank, 0) is the size of the rank's part. If `parts` is
  // null, every part has `count` elements. Other collectives ignore it.
  std::function<uint64_t(int from, int to)> parts = {};

  // Return 0 for a rank that sends or receives no data. For a broadcast every rank has an input.
  uint64_t num_input(Rank rank) const;
  uint64_t num_output(Rank rank) const;
  // A broadcast runs in place in `out`.
  Collective collective(Rank rank, ConstBytes in, Bytes out) const;
  // Returns the sources of a rank's result, in order.
  std::vector<OutputPiece> output(Rank rank) const;
};

}  // namespace cadre::testing
