// Data parallelism: every rank has the whole model, and gradients are averaged during backward().
//
//   cadre::DistributedDataParallel model{std::make_shared<Net>(), world};
//   torch::optim::AdamW optimizer{model->parameters(), 1e-3};
//   {
//     const auto guard = model.no_sync();
//     loss_of(model(x)).backward();  // adds on this rank
//   }
//   auto loss = loss_of(model(x));
//   loss.backward();  // averages over the ranks while it runs
//   optimizer.step();
//   const double mean = model.mean_over_ranks(loss);
//
// Declares:
// - `DistributedDataParallel`, `DistributedDataParallelOptions`: the wrapper.
// - `GradientPlacement`: whether each rank gets all gradients, or those of its shard.
// - `BucketLayout`: which gradient is reduced in which message; part of a snapshot.
// - `plan_bucket_layout()`, `reverse_order()`, `check_layout_fits()`, `BucketCaps`: how a layout is
//   made and checked.
// - `DataParallelModule`, `ModuleHolder`, `NoSync`: what all wrappers of a module have, and the
//   scope of no_sync().
// - `RefusedArgument`: the type of a wrapper that was given an argument of another type.
//
// Guide: docs/guide/parallel/data-parallel.md. PyTorch: torch.nn.parallel.DistributedDataParallel.
#pragma once

#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/ddp/options.h"
#include "cadre/parallel/reduction/data_parallel_module.h"
