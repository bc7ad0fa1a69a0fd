// The parameters and buffers of a module by name, each tensor once, and what modules share.
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
// - `num_elements()`: the number of elements of all tensors together.
// - `SharingModule`: a module that uses another one without registering it, such as a tied head.
//
// Guide: docs/guide/training/gradients.md. PyTorch: torch.nn.Module.named_parameters.
#pragma once

#include "cadre/tensor/hooks/named_tensors.h"
