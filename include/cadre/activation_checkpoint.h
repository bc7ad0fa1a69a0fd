// Computes activations again in backward instead of keeping them.
//
//   auto block = std::make_shared<cadre::ActivationCheckpoint<Net>>();
//   const Tensor output =
//       block->forward(x);  // keeps its input, and computes the rest again in backward
//   const auto outputs = cadre::checkpoint(
//       [](const std::vector<Tensor>& inputs) { return std::vector<Tensor>{inputs[0].relu()}; },
//       {x});
//
// Declares:
// - `ActivationCheckpoint`, `call_checkpointed()`: a module whose forward() keeps only its inputs.
// - `checkpoint()`, `TensorFunction`: calls a function of tensors in the same way.
// - `checkpointing_is_useful()`, `is_checkpoint()`, `allow_partial_backward()`: for code that calls
//   checkpoint() itself.
//
// Guide: docs/guide/training/memory.md. PyTorch: torch.utils.checkpoint.checkpoint.
#pragma once

#include "cadre/tensor/hooks/activations/activation_checkpoint.h"
