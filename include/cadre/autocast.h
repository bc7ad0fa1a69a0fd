// Runs the matrix products and convolutions of a scope in a lower precision.
//
//   at::Tensor loss;
//   {
//     const cadre::Autocast scope(torch::kBFloat16);
//     loss = loss_of(model(x));
//   }
//   loss.backward();
//
// Declares:
// - `Autocast`: the scope.
//
// Guide: docs/guide/training/gradients.md. PyTorch: torch.autocast.
#pragma once

#include "cadre/tensor/hooks/autocast.h"
