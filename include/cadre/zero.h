// ZeRO stages 1 and 2: each rank keeps the optimizer's state of a part of the parameters.
//
//   cadre::DistributedDataParallel model{
//       net, world, {.gradients = cadre::GradientPlacement::kSharded}};
//   cadre::ZeroRedundancyOptimizer<cadre::AdamW> optimizer{model,
//                                                          torch::optim::AdamWOptions(3e-4)};
//   loss_of(model(x)).backward();
//   optimizer.step();  // updates this rank's shard, then gathers the others
//   optimizer.zero_grad();
//
// Declares:
// - `ZeroRedundancyOptimizer`, `ZeroOptions`: shards any optimizer that updates each element
//   independently.
// - `ZeroStage`: whether gradients are whole or sharded when step() is called.
// - `OptimizerOptionsType`, `HasReplicas`: concepts for the arguments of its constructors.
//
// Guide: docs/guide/parallel/zero.md. PyTorch: torch.distributed.optim.ZeroRedundancyOptimizer.
#pragma once

#include "cadre/parallel/zero/options.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
