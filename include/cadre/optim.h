// AdamW, Adam and SGD with fused steps, and optimizers whose state is in a file.
//
//   cadre::AdamW optimizer{model->parameters(),
//                          torch::optim::AdamWOptions(3e-4).weight_decay(0.1)};
//   loss_of(model(x)).backward();
//   optimizer.step();
//   optimizer.zero_grad();
//   cadre::OffloadedOptimizer<torch::optim::RMSprop> other{model->parameters(), 1e-3};
//
// Declares:
// - `AdamW`, `Adam`, `SGD`: the optimizers of torch::optim, with the kernels that are fused.
// - `OffloadedOptimizer`: any optimizer of torch::optim, with its state beside its parameters.
// - `NamedParameters`, `ParameterNames`: parameters with names, which error messages contain.
//
// Guide: docs/guide/training/optimizers.md. PyTorch: torch.optim.AdamW(fused=True).
#pragma once

#include "cadre/tensor/optim/offloaded_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
