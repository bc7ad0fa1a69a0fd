// Data parallelism: every rank has the whole model, and gradients are averaged during backward().
//
//   cadre::DistributedDataParallel model{std::make_shared<Net>(), world};
//   torch::optim::AdamW optimizer{model->parameters(), 1e-3};
//   auto loss = loss_of(model(x));
//   loss.backward();  // averages the gradients over the ranks meanwhile
//   optimizer.step();
//   const double mean = model.mean_over_ranks(loss);
//
//   // A step in parts, whose numbers of samples may differ: gradients are reduced once.
//   const std::vector<int64_t> num_samples = {parts[0].size(0), parts[1].size(0)};
//   loss = model.backward_in_parts(num_samples,
//                                  [&](size_t i) { return loss_of(model(parts[i])); });
//
//   // Gradients in 16 bits on their way to the other ranks.
//   const cadre::DistributedDataParallelOptions options{
//       .comm_hook = cadre::comm_hooks::bf16_compress()};
//
//   // Ranks that train a plain module apart, and average their models every 50 steps.
//   cadre::ModelAverager averager{net, world, {.method = cadre::DiLoCo{.period = 50}}};
//   cadre::ExponentialMovingAverage moving{net, {.decay = 0.999}};
//   averager.step();  // after the optimizer's step
//   moving.update();
//
// Declares:
// - `DistributedDataParallel`, `DistributedDataParallelOptions`: the wrapper.
// - `GradientPlacement`: whether each rank gets all gradients, or those of its shard.
// - `CommHook`, `CommHookTraits`, `GradBucket`, `FinishReduction`, `SavedCommHook`: how a bucket of
//   gradients is reduced, and what is saved of it.
// - `comm_hooks::allreduce()`, `comm_hooks::fp16_compress()`, `comm_hooks::bf16_compress()`,
//   `comm_hooks::fp16_compress_wrapper()`, `comm_hooks::bf16_compress_wrapper()`,
//   `comm_hooks::quantize_per_tensor()`, `comm_hooks::custom()`, `comm_hooks::post_local_sgd()`,
//   `comm_hooks::Hook`: the hooks.
// - `comm_hooks::PostLocalSgdOptions`: when post-local SGD begins, and the ranks of a subgroup.
// - `ModelAverager`, `ModelAveragerOptions`, `AveragerState`: models that are averaged every few
//   steps.
// - `AveragingMethod`, `PeriodicAveraging`, `HierarchicalAveraging`, `AveragingLevel`, `DiLoCo`,
//   `Gossip`, `GossipGraph`: how they are averaged.
// - `ExponentialMovingAverage`, `MovingAverageOptions`: the moving average of a model's weights.
// - `BucketLayout`: which gradients are reduced together in one bucket; saved in snapshots.
// - `plan_bucket_layout()`, `reverse_order()`, `check_layout_fits()`, `BucketCaps`: how a layout is
//   made and checked.
// - `DataParallel`, `DataParallelOptions`: replicas in one process, on several devices or threads.
// - `data_parallel::scatter()`, `data_parallel::replicate()`, `data_parallel::parallel_apply()`,
//   `data_parallel::gather()`, `data_parallel::run_replicas()`, `data_parallel::MakeReplica`: its
//   parts.
// - `DataParallelModule`, `ModuleHolder`, `NoSync`, `NoSyncOptions`: the common interface of all
//   wrappers of a module, and the scope of no_sync().
// - `RefusedArgument`: replaces the module's type if an argument of the constructor has a wrong
//   type, so that the compiler reports one clear error.
//
// Guide: docs/guide/parallel/data-parallel.md, averaging.md and one-process.md. PyTorch:
// torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel.
#pragma once

#include "cadre/parallel/averaging/averaging_method.h"
#include "cadre/parallel/averaging/exponential_moving_average.h"
#include "cadre/parallel/averaging/model_averager.h"
#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/parallel/buckets/comm_hook.h"
#include "cadre/parallel/comm_hooks/comm_hooks.h"
#include "cadre/parallel/data_parallel/data_parallel.h"
#include "cadre/parallel/data_parallel/parallel_apply.h"
#include "cadre/parallel/data_parallel/replicate.h"
#include "cadre/parallel/data_parallel/scatter_gather.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/ddp/options.h"
#include "cadre/parallel/reduction/data_parallel_module.h"
