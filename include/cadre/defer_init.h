// Constructs a module without memory for its values, which it gets later, unit by unit.
//
//   torch::manual_seed(0);
//   auto deferred =
//       cadre::defer_init([] { return std::make_shared<Net>(); });  // sizes and no values
//   cadre::materialize(
//       *deferred);  // all values at once; FullyShardedDataParallel does it unit by unit
//
// Declares:
// - `defer_init()`: calls a function that makes a module, and records how it sets its values.
// - `materialize()`: gives the tensors of a module their values.
// - `is_deferred()`: whether a tensor has no values yet.
// - `DeferredScope`: records what is constructed in a scope.
//
// Guide: docs/guide/parallel/fsdp.md. PyTorch: torch.device('meta'), torchdistx.deferred_init.
#pragma once

#include "cadre/parallel/deferred/deferred_init.h"
