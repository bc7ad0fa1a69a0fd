// Batch normalization over the batches of all ranks.
//
//   auto net = std::make_shared<Net>();  // may have torch::nn::BatchNorm2d members
//   cadre::convert_sync_batchnorm(*net, world);
//   cadre::DistributedDataParallel model{net, world};
//   // A layer that also takes one value per channel on a rank; convert it, too.
//   auto norm = cadre::SyncBatchNorm(64);
//
// Declares:
// - `convert_sync_batchnorm()`: makes the batch normalizations of a module synchronous.
// - `SyncBatchNorm`, `SyncBatchNormImpl`: a batch normalization that must be converted.
//
// Guide: docs/guide/parallel/data-parallel.md. PyTorch: torch.nn.SyncBatchNorm.
#pragma once

#include "cadre/parallel/batchnorm/sync_batch_norm.h"
