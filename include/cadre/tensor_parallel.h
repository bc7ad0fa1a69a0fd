// Divides the layers of a module among the ranks of a mesh axis, by a plan of name patterns.
//
//   const cadre::DeviceMesh mesh(world, {{"tp", 4}});
//   const auto records =
//       cadre::parallelize_module(*net, mesh["tp"],
//                                 {{"blocks.*.up", cadre::ParallelStyle::kColwise},
//                                  {"blocks.*.down", cadre::ParallelStyle::kRowwise}});
//   torch::optim::AdamW optimizer(net->parameters(), 3e-4);
//
// Declares:
// - `parallelize_module()`: divides the layers that the plan names.
// - `tensor_parallel_plan()`: returns the plan for the transformer layers of a module.
//
// Guide: docs/guide/parallel/tensor-parallel.md. PyTorch:
// torch.distributed.tensor.parallel.parallelize_module.
#pragma once

#include "cadre/parallel/tp/parallelize_module.h"
