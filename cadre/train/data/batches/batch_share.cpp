#include "cadre/train/data/batches/batch_share.h"

namespace cadre::data {

std::vector<int64_t> positions_of(const BatchShare& share, int64_t begin, int64_t end) {
  std::vector<int64_t> positions;
  if (share.split == BatchSplit::kConsecutive) {
    const int64_t count = end - begin;
    const int64_t last = begin + count * (share.rank + 1) / share.world_size;
    for (int64_t i = begin + count * share.rank / share.world_size; i < last; ++i) {
      positions.push_back(i);
    }
    return positions;
  }
  // The first position at or after `begin` that is congruent to the rank, modulo the world size.
  int64_t i = begin + (share.rank - begin % share.world_size + share.world_size) % share.world_size;
  for (; i < end; i += share.world_size) positions.push_back(i);
  return positions;
}

}  // namespace cadre::data
