// Fully sharded data parallelism (ZeRO stage 3): each rank owns a shard of every parameter.
//
//   struct Model : torch::nn::Module {  // has a unit, and is none itself
//     std::shared_ptr<cadre::ShardUnit<Net>> block =
//         register_module("block", std::make_shared<cadre::ShardUnit<Net>>());
//     Tensor forward(const Tensor& x) { return block->forward(x); }
//   };
//   const auto whole = std::make_shared<Model>();
//   cadre::fully_shard(whole->block, {.reshard = cadre::Reshard::kAfterBackward});
//   cadre::FullyShardedDataParallel model{whole, world, {.form = cadre::ShardForm::kMapped}};
//   cadre::ShardedOptimizer<cadre::AdamW> optimizer{model, torch::optim::AdamWOptions(3e-4)};
//   loss_of(model(x)).backward();
//   optimizer.step();
//   auto full = model.summon_full_params();  // the whole parameters, in a scope
//
// Declares:
// - `FullyShardedDataParallel`, `FullyShardedDataParallelOptions`: the wrapper.
// - `ShardUnit`: a module whose parameters are gathered before each use, and freed after it.
// - `fully_shard()`, `FullyShardOptions`: makes a ShardUnit of the model a unit of its own.
// - `WrapPolicy`, `WrapCandidate`, `wrap_by_size()`, `wrap_by_type()`: functions that choose the
//   units, in place of fully_shard() calls.
// - `Reshard`, `ShardPrecision`, `FileOffload`: when gathered parameters are freed, their dtypes,
//   and shards in a file on disk.
// - `to_string()`, `parse_reshard()`: the names of the values of Reshard.
// - `FullParameters`: the result of summon_full_params(): the whole parameters in a scope.
//
// Guide: docs/guide/parallel/fsdp.md. PyTorch: torch.distributed.fsdp.FullyShardedDataParallel,
// fully_shard.
#pragma once

#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/fsdp/shard_unit.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
