// Fully sharded data parallelism (ZeRO stage 3): each rank owns a shard of every parameter.
//
//   struct Model : torch::nn::Module {  // has a unit, and is none itself
//     std::shared_ptr<Net> block = register_module("block", std::make_shared<Net>());
//     Tensor forward(const Tensor& x) { return block->forward(x); }
//   };
//   cadre::FullyShardedDataParallel model{
//       std::make_shared<Model>(), world,
//       {.form = cadre::ShardForm::kMapped, .wrap_policy = cadre::wrap_by_type<Net>()}};
//   cadre::ShardedOptimizer<cadre::AdamW> optimizer{model, torch::optim::AdamWOptions(3e-4)};
//   loss_of(model(x)).backward();
//   optimizer.step();
//   auto full = model.summon_full_params();  // the whole parameters, in a scope
//
// Declares:
// - `FullyShardedDataParallel`, `FullyShardedDataParallelOptions`: the wrapper.
// - `WrapPolicy`, `WrapCandidate`, `WrapChoice`: a function that chooses the units, modules whose
//   parameters are gathered before they are used and freed afterwards.
// - `wrap_by_type()`, `wrap_by_name()`, `wrap_by_size()`, `wrap_layers()`, `wrap_shard_units()`,
//   `unit_if()`: such functions.
// - `ShardUnit`: a module that is made a unit by its type, and casts its inputs and outputs.
// - `fully_shard()`, `FullyShardOptions`: makes a ShardUnit of the model a unit with options of its
//   own.
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
