// The parameters and buffers of a module by name, each tensor once.
//
//   for (const cadre::NamedTensor& parameter : cadre::distinct_parameters(*net)) {
//     std::printf("%s: %d elements\n", parameter.name.c_str(),
//                 static_cast<int>(parameter.tensor.numel()));
//   }
//
// Declares:
// - `NamedTensor`: a tensor and its name.
// - `distinct_parameters()`, `distinct_buffers()`: a tied weight comes once, by the first of its
//   names.
//
// Guide: docs/guide/training/gradients.md. PyTorch: torch.nn.Module.named_parameters.
#pragma once

#include "cadre/tensor/hooks/named_tensors.h"
