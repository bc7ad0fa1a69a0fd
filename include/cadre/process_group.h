// A group of ranks that exchange tensors, and the call that joins the job of the launcher.
//
//   const cadre::ProcessGroup world = cadre::init_process_group();
//   const auto tensor = torch::full({3}, world.rank() + 1.0);
//   world.all_reduce(tensor, {.op = cadre::ReduceOp::kAvg});
//   const cadre::Work work = world.broadcast_async(tensor, {.root = 0});
//   work.wait();
//   const auto row = world.split({.color = world.rank() / 4, .key = world.rank()});
//   world.close();
//
// Declares:
// - `ProcessGroup`: collectives, messages and subgroups; a cheap value.
// - `init_process_group()`, `InitOptions`: joins the job; without a launcher it returns a group of
//   one rank.
// - `spawn()`, `SpawnOptions`, `SpawnMethod`, `kMaxSpawnedRanks`: starts the ranks from within a
//   program, as processes or threads.
// - `AllReduceOptions`, `ReduceOptions`, `ReduceScatterOptions`, `AllGatherOptions`: options of
//   collectives.
// - `BroadcastOptions`, `GatherOptions`, `ScatterOptions`, `BarrierOptions`: options of
//   collectives.
// - `AllToAllOptions`, `AllToAllListOptions`: options of exchanges, with sizes for each rank.
// - `MessageOptions`, `P2POp`, `BatchOptions`: messages between two ranks, and several at once.
// - `SplitGroupOptions`, `NewGroupOptions`, `NewGroupOverStoreOptions`: options of subgroups.
// - `RejoinOptions`: options of rejoin(), after a failure.
// - `on_main_rank()`, `main_rank_first()`, `run_main_rank_first()`, `is_main_rank()`,
//   `MainRankOptions`: work that one rank does for all ranks, or before the others do it.
// - `RankLog`, `RankLogOptions`, `LoggingRanks`: a log whose lines contain the rank.
//
// Guide: docs/guide/reference/groups-and-messages.md, docs/guide/running/spawn.md. PyTorch:
// torch.distributed.ProcessGroup, init_process_group, torch.multiprocessing.spawn.
#pragma once

#include "cadre/tensor/group/main_rank.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/group/rank_log.h"
#include "cadre/tensor/group/spawn/spawn.h"
