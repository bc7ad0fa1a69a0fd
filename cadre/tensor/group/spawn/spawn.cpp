#include "cadre/tensor/group/spawn/spawn.h"

#include <ATen/Parallel.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/record/record.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/job_environment.h"
#include "cadre/launch/job/spawn/spawn_workers.h"
#include "cadre/tensor/group/spawn/thread_ranks.h"

namespace cadre {
namespace {

using RankFunction = std::function<void(const ProcessGroup& world)>;

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "spawn: " + what);
}

std::optional<std::string> variable(std::string_view name) {
  const char* const value = std::getenv(std::string(name).c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

void check(const RankFunction& function, int num_ranks, const SpawnOptions& options) {
  if (!function) refuse("the function is empty; pass the one that each rank calls");
  if (num_ranks < 1 || num_ranks > kMaxSpawnedRanks) {
    refuse(format("the number of ranks is {}; pass one from 1 to {}", num_ranks, kMaxSpawnedRanks));
  }
  for (const auto& [name, timeout] :
       {std::pair("timeout", options.timeout), {"connect_timeout", options.connect_timeout}}) {
    if (timeout <= Duration(0)) {
      refuse(format("SpawnOptions::{} must be positive; leave it out for the default", name));
    }
  }
  if (is_thread_rank()) {
    refuse("it was called by a rank of spawn(); make groups of its ranks with split()");
  }
  const auto place = parse_job_environment(variable, os::Secret()).value_or_throw();
  if (place.is_launched) {
    refuse(
        format("this process is rank {} of {} already, started by a launcher or by spawn(); call "
               "init_process_group(), or start the program without a launcher",
               place.rank, place.world_size));
  }
}

// Returns how many threads each rank computes with; 0 if the user has set the number.
int share_of_cores(int num_ranks) {
  if (!variable("OMP_NUM_THREADS").value_or("").empty()) return 0;
  return std::max(os::make_native_system()->host().num_cores / num_ranks, 1);
}

[[noreturn]] void fail(const std::string& what, std::optional<Rank> rank) {
  throw Error(ErrorCode::kAborted, "spawn: " + what).with_details({.culprit = rank});
}

void spawn_threads(const RankFunction& function, int num_ranks, const SpawnOptions& options) {
  const auto failure = run_thread_ranks(function, num_ranks, share_of_cores(num_ranks), options);
  if (!failure) return;
  fail(format("rank {} of {} failed: {}: {}", failure->rank, num_ranks,
              to_string(failure->error.code()), failure->error.message()),
       failure->rank);
}

void spawn_processes(const RankFunction& function, int num_ranks, const SpawnOptions& options) {
  const int num_compute_threads = share_of_cores(num_ranks);
  // The group of a rank that fails lives until its process has ended. So the other ranks learn of
  // the failure afterwards, and the launcher sees this rank fail first.
  const auto world = std::make_shared<std::optional<ProcessGroup>>();
  const auto rank_main = [&] {
    return record([&] {
      if (num_compute_threads > 0) at::set_num_threads(num_compute_threads);
      *world = init_process_group(
          {.timeout = options.timeout, .connect_timeout = options.connect_timeout});
      function(**world);
      (*world)->close();
      return 0;
    });
  };
  const auto ended = launch::spawn_workers(
      {.num_ranks = num_ranks, .rank_main = rank_main, .prefix = options.prefix});
  if (!ended.ok()) throw ended.error().with_context("spawn");
  if (ended->signal != 0) ::raise(ended->signal);
  if (!ended->failure.empty()) fail(ended->failure, ended->failed_rank);
}

}  // namespace

void spawn(const RankFunction& function, int num_ranks, const SpawnOptions& options) {
  check(function, num_ranks, options);
  if (options.method == SpawnMethod::kThreads) return spawn_threads(function, num_ranks, options);
  spawn_processes(function, num_ranks, options);
}

}  // namespace cadre
