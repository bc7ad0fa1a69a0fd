// A call of any collective as a value: the number of elements that each rank brings and receives,
// the Collective over given buffers, and the place that each element of the result comes from.
// Tests of all collectives are written once over it.
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

// Consecutive elements of a result.
struct OutputPiece {
  std::optional<int> from;  // the rank whose input they are; nullopt: the reduction of all inputs
  uint64_t begin = 0;       // their place in that input
  uint64_t count = 0;
};

struct CollectiveCall {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUint8;
  uint64_t count = 0;  // elements of one rank's part
  Rank root = 0;
  Reduction reduction = {};
  int world_size = 1;
  // Elements from one rank to another in all_to_all_v; (rank, 0) are those of the rank's part in
  // all_gather_v and reduce_scatter_v. Null: `count` everywhere. Other kinds do not use it.
  std::function<uint64_t(int from, int to)> parts = {};

  // A rank that brings or receives nothing has 0 elements. Every rank brings data to a broadcast.
  uint64_t num_input(Rank rank) const;
  uint64_t num_output(Rank rank) const;
  // A broadcast is in place in `out`.
  Collective collective(Rank rank, ConstBytes in, Bytes out) const;
  // The result of a rank, in order.
  std::vector<OutputPiece> output(Rank rank) const;
};

}  // namespace cadre::testing
