// Groups of any size in one process without peers, for dry runs: a program makes all its calls with
// the shapes that a rank of a large job has, and no data moves.
//
// Collectives return at once. What comes from other ranks is a placeholder:
//   all_reduce, reduce, reduce_scatter   this rank's own input, unreduced: its part of it for
//                                        reduce_scatter, multiplied by the factor for PREMUL_SUM
//   all_gather, gather                   this rank's own input in the place of each rank; where the
//                                        inputs have different sizes, as much of it as fits, then
//                                        zeros
//   all_to_all                           the part that this rank sends to a rank, in the place of
//                                        what comes from it; as much as fits, then zeros
//   broadcast                            what is in the buffer, also where another rank is the root
//   scatter                              this rank's part on the root, zeros on other ranks
// So ranks that compare what they pass agree, sums are too small, and a loss means nothing. Calls
// are checked as in every group. Messages, split() and rejoin() are refused; new_group(),
// new_group_over_store() and the axes of a DeviceMesh are groups of this kind.
//
// Threads, blocking and errors: those of Communicator. Source: c10d's backend "fake", which leaves
// the results of reductions, broadcasts and exchanges untouched, too.
#pragma once

#include <memory>
#include <string>

#include "cadre/core/base/export.h"
#include "cadre/core/base/log.h"
#include "cadre/core/comm/communicator.h"

namespace cadre::testing {

struct FakeGroupOptions {
  int rank = 0;                       // this process's rank; the other ranks do not exist
  std::string name = "fake";          // name in messages
  std::shared_ptr<LogSink> log = {};  // null: messages are dropped
};

// Makes a group of `world_size` ranks, which all count as ranks of this host. It owns its System.
// Throws kInvalidArgument for a rank that is not one of 0 to world_size - 1.
CADRE_EXPORT std::shared_ptr<Communicator> make_fake_communicator(
    int world_size, const FakeGroupOptions& options = {});

}  // namespace cadre::testing
