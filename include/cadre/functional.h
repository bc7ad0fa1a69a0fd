// Collectives through which gradients flow: each has the adjoint collective as its backward.
//
//   namespace functional = cadre::functional;
//   const auto all = functional::all_gather(x, world);  // (world_size * n, d) from (n, d)
//   auto loss = loss_of(all, rows);                            // of this rank's n samples
//   loss.backward();  // x gets a gradient from every rank's loss
//   const auto sum = functional::all_reduce(loss, world, {.op = cadre::ReduceOp::kAvg});
//
// Declares:
// - `functional::all_reduce()`, `functional::all_gather()`, `functional::reduce_scatter()`,
//   `functional::all_to_all()`, `functional::broadcast()`: their backward computes the gradient of
//   the sum of all ranks' losses.
// - `functional::copy_to_group()`, `functional::reduce_from_group()`: Megatron-LM's f and g. Their
//   backward computes the gradient of one loss that all ranks compute.
// - `functional::scatter_to_group()`, `functional::gather_from_group()`: split a tensor along a
//   dimension, and join it, for one loss that all ranks compute.
// - `functional::ReduceFromGroupOptions`, `functional::DimensionOptions`: the options of these
//   functions.
//
// Guide: docs/guide/reference/differentiable-collectives.md. PyTorch:
// torch.distributed.nn.functional, _functional_collectives.
#pragma once

#include "cadre/tensor/group/backward/differentiable.h"
