// Groups of any size in one process without other ranks, for dry runs: a program makes all of its
// calls with the shapes that a rank of a large job has, and no data is exchanged.
//
// Collectives return at once. Data from other ranks is replaced as follows:
//   all_reduce, reduce, reduce_scatter   this rank's own input, unreduced; for reduce_scatter this
//                                        rank's part of it, for PREMUL_SUM multiplied by the factor
//   all_gather, gather                   this rank's own input in the place of each rank's; if the
//                                        sizes differ, as much of it as fits, then zeros
//   all_to_all                           in the place of the part from a rank, the part that this
//                                        rank sends to it; as much as fits, then zeros
//   broadcast                            the buffer is unchanged, even if another rank is the root
//   scatter                              this rank's part on the root, zeros on other ranks
// So a comparison of values between ranks finds no difference, sums are too small, and losses have
// no meaning. The arguments of calls are checked as in every group. Messages, split() and rejoin()
// throw. new_group(), new_group_over_store() and the axes of a DeviceMesh also make groups without
// other ranks.
//
// Threads, blocking and errors: those of Communicator. Source: c10d's backend "fake", which also
// leaves the results of reductions, broadcasts and exchanges unchanged.
#pragma once

#include <memory>
#include <string>

#include "cadre/core/base/export.h"
#include "cadre/core/base/log.h"
#include "cadre/core/comm/communicator.h"

namespace cadre::testing {

struct FakeGroupOptions {
  int rank = 0;                       // this process's rank; the other ranks do not exist
  std::string name = "fake";          // the name of the group in messages
  std::shared_ptr<LogSink> log = {};  // null: log messages are dropped
};

// Makes a group of `world_size` ranks, all of which count as ranks of this host. The group owns its
// System. Throws kInvalidArgument if options.rank is not in [0, world_size).
CADRE_EXPORT std::shared_ptr<Communicator> make_fake_communicator(
    int world_size, const FakeGroupOptions& options = {});

}  // namespace cadre::testing
