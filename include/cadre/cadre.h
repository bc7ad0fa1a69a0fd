// All topics that use libtorch in one header: distributed training for C++.
//
//   const auto world = cadre::init_process_group();
//   cadre::DistributedDataParallel model{std::make_shared<Net>(), world};
//   torch::optim::AdamW optimizer{model->parameters(), 1e-3};
//   loss_of(model(x)).backward();
//   optimizer.step();
//   world.close();
//
// Each topic has a header of its own, which compiles faster. Stores, rendezvous, the Communicator,
// schedules and prepare_restart() are in core.h, which needs no torch.
//
// Guide: docs/guide/reference/topics.md.
#pragma once

#include "cadre/activation_checkpoint.h"
#include "cadre/attention.h"
#include "cadre/autocast.h"
#include "cadre/data.h"
#include "cadre/ddp.h"
#include "cadre/defer_init.h"
#include "cadre/device.h"
#include "cadre/dtensor.h"
#include "cadre/error.h"
#include "cadre/expert_parallel.h"
#include "cadre/fsdp.h"
#include "cadre/functional.h"
#include "cadre/gradients.h"
#include "cadre/layers.h"
#include "cadre/mesh.h"
#include "cadre/named_tensors.h"
#include "cadre/optim.h"
#include "cadre/pipeline.h"
#include "cadre/plan.h"
#include "cadre/process_group.h"
#include "cadre/shards.h"
#include "cadre/snapshots.h"
#include "cadre/symmetric_tensor.h"
#include "cadre/sync_batch_norm.h"
#include "cadre/tensor_parallel.h"
#include "cadre/training.h"
#include "cadre/transformer.h"
#include "cadre/verify.h"
#include "cadre/zero.h"
