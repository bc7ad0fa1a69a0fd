// What a rank owns of each parameter of a wrapped model, and the optimizer and the scope that
// change it.
//
//   cadre::FullyShardedDataParallel model{net, world};
//   cadre::ShardedOptimizer<cadre::AdamW> optimizer{model, torch::optim::AdamWOptions(3e-4)};
//   {
//     const torch::NoGradGuard no_grad;
//     cadre::ShardUpdate update{model};  // collective
//     for (const auto& shard : model.parameter_shards()) shard.values.mul_(0.5);
//     update.finish();
//   }
//
// Declares:
// - `ParameterShard`: describes one parameter: name, sizes, mesh, placements and this rank's
//   values.
// - `ShardedOptimizer`, `GroupsOfParameters`: an optimizer that updates shards.
// - `ShardUpdate`: the scope in which a program writes the values of ParameterShards.
// - `ShardMemory`: identifies the memory of a wrapper that has these values; for Cadre's own use.
// - `DataStrategy`, `to_string()`, `parse_data_strategy()`, `has_units()`: the strategies of data
//   parallelism and their names, for plans and verifications.
// - `ShardForm`: whether ranks gather copies of the shards of others, or map them in shared memory.
// - `ParameterSize`, `sizes_of()`: names and sizes of parameters, without values.
// - `FlatRange`: a range of the elements of a tensor, in row-major order.
// - `HasParameterShards`, `HasParameters`, `HasGradients`, `HasShardUpdates`: concepts for wrappers
//   and modules with these members.
//
// Guide: docs/guide/parallel/fsdp.md. PyTorch: torch.distributed.fsdp.FlatParameter.
#pragma once

#include "cadre/parallel/shard/data_strategy.h"
#include "cadre/parallel/shard/flat_layout.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
