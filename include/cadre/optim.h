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
// - `AdamW`, `Adam`, `SGD`, `Adagrad`: the optimizers of torch::optim, with fused kernels.
// - `Adadelta`, `AdadeltaOptions`, `AdadeltaParamState`: Adadelta as in Python's torch.optim, which
//   the C++ API of libtorch lacks.
// - `OffloadedOptimizer`: any optimizer of torch::optim, with its state in the file of its
//   parameters.
// - `zeros_beside()`, `moved_beside()`: tensors in the file of an offloaded parameter, for
//   optimizers of your own.
// - `ParameterState`: the state of an optimizer for one parameter, as state_dict() returns it.
// - `NamedParameters`, `ParameterNames`: parameters with names, which error messages contain.
//
// Guide: docs/guide/training/optimizers.md. PyTorch: torch.optim.AdamW(fused=True).
#pragma once

#include "cadre/tensor/group/beside.h"
#include "cadre/tensor/optim/offloaded_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/tensor/optim/parameter_state.h"
