// What the tests of DDP share: groups on threads as ranks, and how ranks share a batch.
//
// Threads: plain functions; run_groups() as process_group_test_ranks.h says. Blocking: likewise.
#pragma once

#include <torch/nn.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>

#include "cadre/group/process_group_test_ranks.h"

namespace cadre::testing {

// Rows [begin, end) of a batch that belong to `rank`: shares differ by one row at most.
struct Share {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
};

inline Share share_of(int64_t batch, int rank, int world_size) {
  return {batch * rank / world_size, batch * (rank + 1) / world_size};
}

}  // namespace cadre::testing
