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
// - `ShardUpdate`, `ShardFence`: an update in a scope, and what separates reads from writes.
// - `DataStrategy`, `to_string()`, `parse_data_strategy()`, `has_units()`: the strategies of data
//   parallelism and their names, for plans and verifications.
// - `ShardForm`: whether ranks copy the shards of others or map them.
// - `ParameterDivision`, `keep_division()`, `division_of()`: a parameter that was divided before it
//   was wrapped.
// - `on_joint_mesh()`, `mesh_of_wrapper()`, `dividing_groups()`: the mesh of a record, and its
//   groups.
// - `local_box_of()`, `boxes_of()`, `boxes_of_range()`: the boxes of the whole tensor that a record
//   covers.
// - `ParameterSize`, `sizes_of()`: parameters without their values.
// - `FlatLayout`, `FlatRange`, `FlatAlignment`: where tensors lie in a flat buffer.
// - `FlatParameters`, `FlatParametersOptions`, `gather_changed()`: parameters in one flat buffer,
//   of which each rank owns a part.
// - `HasParameterShards`, `HasParameters`, `HasGradients`, `HasFlatParameters`, `HasShardFence`:
//   what a wrapper or a module has.
//
// Guide: docs/guide/parallel/fsdp.md. PyTorch: torch.distributed.fsdp.FlatParameter.
#pragma once

#include "cadre/parallel/shard/data_strategy.h"
#include "cadre/parallel/shard/flat_layout.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/parallel/shard/shard_fence.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
