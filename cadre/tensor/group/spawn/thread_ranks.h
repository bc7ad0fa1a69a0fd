// The ranks of spawn() that are threads of this process.
//
// Threads: one for each rank. Blocking: until all have ended. Lifetime: groups that the program
// keeps own what they need. Errors: as spawn() says.
#pragma once

#include <functional>
#include <optional>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/group/spawn/spawn.h"

namespace cadre {

struct RankFailure {
  Rank rank;
  Error error;  // what the rank has thrown
};

// Returns whether the calling thread is such a rank.
bool is_thread_rank();

// Returns the failure of the rank that failed first; nullopt if all succeeded. Each rank computes
// with `num_compute_threads` threads, or as many as this process if it is 0.
std::optional<RankFailure> run_thread_ranks(
    const std::function<void(const ProcessGroup& world)>& function, int num_ranks,
    int num_compute_threads, const SpawnOptions& options);

}  // namespace cadre
