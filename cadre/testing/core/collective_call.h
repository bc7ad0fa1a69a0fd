// Describes a call of any collective as a value: the number of elements that each rank sends and
// receives, the Collective for given buffers, and the source of each element of the result. So a
// test can be written once for all collectives.
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

// Consecutive elements of a result that come from the same source.
struct OutputPiece {
  // The rank from whose input the elements are copied; nullopt if they are the reduction of the
  // inputs of all ranks.
  std::optional<int> from;
  uint64_t begin = 0;  // the index of the first element in the input
  uint64_t count = 0;
};

struct CollectiveCall {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUint8;
  uint64_t count = 0;  // the number of elements in one rank's part
  Rank root = 0;
  Reduction reduction = {};
  int world_size = 1;
  // Used by collectives with parts of different sizes. parts(from, to) is the number of elements
  // that one rank sends to another in all_to_all_v. In all_gather_v and reduce_scatter_v,
  // parts(rank, 0) is the size of the rank's part. If `parts` is null, every part has `count`
  // elements.
  std::function<uint64_t(int from, int to)> parts = {};

  // num_input() and num_output() return the number of elements that a rank sends and receives; 0 if
  // it sends or receives nothing. In a broadcast every rank counts as having an input.
  uint64_t num_input(Rank rank) const;
  uint64_t num_output(Rank rank) const;
  // Returns the Collective over these buffers. A broadcast runs in place in `out`.
  Collective collective(Rank rank, ConstBytes in, Bytes out) const;
  // Returns the pieces of the ranks' inputs of which a rank's result consists, in the order in
  // which they lie in the result.
  std::vector<OutputPiece> output(Rank rank) const;
};

}  // namespace cadre::testing
