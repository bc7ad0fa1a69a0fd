// Runs work on one rank for all ranks, or on one rank before the others: downloads, files that
// every rank reads, log lines.
//
//   cadre::on_main_rank(world, [&] { download(folder); });
//   const auto data = cadre::main_rank_first(world, [&] { return load_or_convert(folder); },
//                                            {.of_each_node = true});
//
// The main rank is rank 0 of the group. With of_each_node each host has one, the lowest rank of the
// group there, for work on the hosts' own disks.
//
// Threads: as ProcessGroup. Blocking: collective; all ranks of the group make the same calls in the
// same order. A rank waits at most for the timeout of the options, whose default is longer than
// that of a collective. Errors: what `work` throws on one rank, of any type, is thrown as
// cadre::Error on all ranks, with the rank, and the group stays usable; errors of the group.
// REQUIRES: `work` contains no collective of the group.
// Source: main_process_first() and on_main_process() of Hugging Face Accelerate.
#pragma once

#include <functional>
#include <optional>
#include <type_traits>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/core/os/defaults.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

struct MainRankOptions {
  bool of_each_node = false;
  // The time limit for the work of the main rank. In main_rank_first() the other ranks then have
  // the same limit for their own work.
  Duration timeout = kDefaultMainRankTimeout;
};

// Returns whether this rank is a main rank. No communication.
CADRE_EXPORT bool is_main_rank(const ProcessGroup& group, const MainRankOptions& options = {});

// Runs `work` on the main rank. Returns on all ranks when the work has ended.
CADRE_EXPORT void on_main_rank(const ProcessGroup& group, const std::function<void()>& work,
                               const MainRankOptions& options = {});

// Runs `work` on the main rank and then on all other ranks at the same time, so that they can read
// the files that the main rank has written. Returns when all ranks have ended it. main_rank_first()
// returns on each rank what `work` has returned there.
CADRE_EXPORT void run_main_rank_first(const ProcessGroup& group, const std::function<void()>& work,
                                      const MainRankOptions& options = {});
template <typename Work>
std::invoke_result_t<Work&> main_rank_first(const ProcessGroup& group, Work work,
                                            const MainRankOptions& options = {}) {
  if constexpr (std::is_void_v<std::invoke_result_t<Work&>>) {
    run_main_rank_first(group, work, options);
  } else {
    std::optional<std::invoke_result_t<Work&>> result;
    run_main_rank_first(
        group, [&] { result.emplace(work()); }, options);
    return *std::move(result);
  }
}

}  // namespace cadre
