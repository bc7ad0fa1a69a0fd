// Cadre: distributed training for C++ on libtorch. One header for programs; each part documents its
// own threads, blocking, lifetime and errors.
#pragma once

#include "cadre/base/error.h"
#include "cadre/checkpoint/module_file.h"
#include "cadre/checkpoint/snapshot_folder.h"
#include "cadre/data/data_loader.h"
#include "cadre/data/distributed_sampler.h"
#include "cadre/data/mnist.h"
#include "cadre/group/differentiable.h"
#include "cadre/group/mapped_parts.h"
#include "cadre/group/process_group.h"
#include "cadre/mesh/device_mesh.h"
#include "cadre/mesh/dtensor.h"
#include "cadre/mesh/placement.h"
#include "cadre/optim/optimizers.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/shard/flat_parameters.h"
#include "cadre/shard/parameter_shard.h"
#include "cadre/shard/shard_fence.h"
#include "cadre/shard/sharded_optimizer.h"
#include "cadre/wrap/autocast.h"
#include "cadre/wrap/gradient_norm.h"
