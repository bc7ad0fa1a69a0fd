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
// - `ParameterShard`: the record of one parameter: name, sizes, mesh, placements and this rank's
//   values.
// - `ShardedOptimizer`, `GroupsOfParameters`: an optimizer whose step() is an update of shards.
// - `ShardUpdate`: the scope in which a program writes the values of records.
// - `ShardMemory`: the memory of a wrapper in which they lie; only Cadre looks into it.
// - `DataStrategy`, `to_string()`, `parse_data_strategy()`, `has_units()`: the strategies of data
//   parallelism and their names, for plans and verifications.
// - `ShardForm`: whether ranks copy the shards of others or map them.
// - `ParameterSize`, `sizes_of()`: parameters without their values.
// - `FlatRange`: a range of the elements of a tensor, in row-major order.
// - `HasParameterShards`, `HasParameters`, `HasGradients`, `HasShardUpdates`: what a wrapper or a
//   module has.
//
// Guide: docs/guide/parallel/fsdp.md. PyTorch: torch.distributed.fsdp.FlatParameter.
#pragma once

#include "cadre/parallel/shard/data_strategy.h"
#include "cadre/parallel/shard/flat_layout.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
