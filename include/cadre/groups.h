// Groups of some of the ranks of a Communicator, and the group of the ranks that survive a failure.
//
//   const int row = group.rank() / 4;
//   const auto row_group = cadre::split(group, {.color = row, .key = group.rank()}, deadline);
//   const auto even_ranks = cadre::new_group(group, std::vector<cadre::Rank>{0, 2}, deadline);
//   const auto survivors = cadre::rejoin_group(group, {.agreement = std::chrono::seconds(30)});
//
// Declares:
// - `split()`, `SplitOptions`: all ranks call it; ranks of one color make a group.
// - `new_group()`: all ranks call it with the list of the new group's members.
// - `new_group_over_store()`, `StoreGroupOptions`: only the members call it.
// - `rejoin_group()`, `RejoinTimes`: the remaining ranks of a failed group make a new one.
//
// Guide: docs/guide/reference/groups-and-messages.md. PyTorch: torch.distributed.new_group; MPI:
// MPI_Comm_split.
#pragma once

#include "cadre/core/comm/groups/rejoin_group.h"
#include "cadre/core/comm/groups/split.h"
