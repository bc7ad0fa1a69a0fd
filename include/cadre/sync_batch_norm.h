// Batch normalization over the batches of all ranks.
//
//   auto net = std::make_shared<Net>();         // may have torch::nn::BatchNorm2d members
//   cadre::convert_sync_batchnorm(*net, world);  // those use the statistics of all ranks from now
//   on cadre::DistributedDataParallel model{net, world}; auto norm = cadre::SyncBatchNorm(64);  //
//   a layer for one value per channel on a rank, too
//
// Declares:
// - `convert_sync_batchnorm()`: makes the batch normalizations of a module synchronous.
// - `SyncBatchNorm`, `SyncBatchNormImpl`: a batch normalization that must be converted.
//
// Guide: docs/guide/parallel/data-parallel.md. PyTorch: torch.nn.SyncBatchNorm.
#pragma once

#include "cadre/parallel/batchnorm/sync_batch_norm.h"
