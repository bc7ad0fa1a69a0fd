// The part of each batch that one rank gets, which all loaders compute alike.
//
// Threads: plain values and pure functions. Blocking: never. Errors: none.
#pragma once

#include <cstdint>
#include <vector>

#include "cadre/train/data/batches/batch_split.h"

namespace cadre::data {

struct BatchShare {
  BatchSplit split = BatchSplit::kInTurn;
  int64_t batch_size = 1;  // the samples of all ranks together
  int64_t rank = 0;
  int64_t world_size = 1;
};

// Returns the rank's positions of the batch that has the positions [begin, end) of an epoch.
std::vector<int64_t> positions_of(const BatchShare& share, int64_t begin, int64_t end);

}  // namespace cadre::data
