// AdamW, Adam, SGD and Adagrad with fused steps, and optimizers whose state is in a file.
//
//   cadre::AdamW optimizer{model->parameters(),
//                          torch::optim::AdamWOptions(3e-4).weight_decay(0.1)};
//   loss_of(model(x)).backward();
//   optimizer.step();
//   optimizer.zero_grad();
//   cadre::OffloadedOptimizer<torch::optim::RMSprop> other{model->parameters(), 1e-3};
//
// Declares:
// - `AdamW`, `Adam`, `SGD`, `Adagrad`: the optimizers of torch::optim, with the kernels that are
//   fused.
// - `Adadelta`, `AdadeltaOptions`, `AdadeltaParamState`: torch.optim's, which libtorch does
//   not have in C++.
// - `OffloadedOptimizer`: any optimizer of torch::optim, with its state beside its parameters.
// - `zeros_beside()`, `moved_beside()`: tensors in the file of an offloaded parameter, for
//   optimizers of your own.
// - `ParameterState`: the state of an optimizer for one parameter: what state_dict() returns.
// - `NamedParameters`, `ParameterNames`: parameters with names, which error messages contain.
//
// Guide: docs/guide/training/optimizers.md. PyTorch: torch.optim.AdamW(fused=True).
#pragma once

#include "cadre/tensor/group/beside.h"
#include "cadre/tensor/optim/offloaded_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/tensor/optim/parameter_state.h"
