// Collectives through which gradients flow: each has the adjoint collective as its backward.
//
//   namespace functional = cadre::functional;
//   const auto all = functional::all_gather_tensor(x, world);  // (world_size * n, d) from (n, d)
//   auto loss = loss_of(all, rows);                            // of this rank's n samples
//   loss.backward();  // x gets a gradient from every rank's loss
//   const auto sum = functional::all_reduce(loss, world, {.op = cadre::ReduceOp::kAvg});
//
// Declares:
// - `functional::all_reduce()`, `functional::all_gather_tensor()`,
//   `functional::reduce_scatter_tensor()`: the gradient of the sum over the ranks of each rank's
//   loss.
// - `functional::all_to_all_single()`, `functional::broadcast()`: likewise.
// - `functional::copy_to_group()`, `functional::reduce_from_group()`: Megatron's f and g: the
//   gradient of one loss that all ranks compute.
// - `functional::scatter_to_group()`, `functional::gather_from_group()`: parts along a dimension,
//   likewise.
// - `functional::ReduceFromGroupOptions`, `functional::DimensionOptions`: their options.
//
// Guide: docs/guide/reference/differentiable-collectives.md. PyTorch:
// torch.distributed.nn.functional, _functional_collectives.
#pragma once

#include "cadre/tensor/group/backward/differentiable.h"
