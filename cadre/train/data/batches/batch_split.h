// The division of batches among ranks, and the position of a loader.
//
// Threads: plain values. Blocking: never. Errors: none.
#pragma once

#include <cstdint>

namespace cadre {

// The way in which a batch is divided among the ranks.
enum class BatchSplit : uint8_t {
  // Each rank gets every world_size-th sample of the epoch, beginning with the sample at the index
  // of the rank.
  kInTurn,
  // The slices of the ranks, concatenated in rank order, are the batch. Use it if the order of
  // samples matters, for example if experts have a limited capacity and drop the last tokens.
  kConsecutive,
};

// A position that is equal on all ranks, and valid for any number of ranks.
struct LoaderPosition {
  int64_t epoch = 0;
  // The number of samples of this epoch that were delivered to all ranks together.
  int64_t samples = 0;

  friend bool operator==(const LoaderPosition&, const LoaderPosition&) = default;
};

}  // namespace cadre
