// Tensors in memory that the ranks of a host share.
//
//   const auto shared =
//       cadre::SymmetricTensor::allocate(world, 1024, at::kFloat);  // (1024) of each rank
//   const int right = (world.rank() + 1) % world.world_size();
//   const int left = (world.rank() + world.world_size() - 1) % world.world_size();
//   if (shared.shares_memory()) {
//     shared.peer(right).copy_(x);
//     shared.signal(right, /*slot=*/0);
//     shared.wait_signal(left, /*slot=*/0, {.timeout = std::chrono::seconds(5)});
//   }
//
// Declares:
// - `SymmetricTensor`, `SymmetricTensorOptions`: a tensor of each rank that the other ranks read,
//   write and signal in place. An option makes the tensors of all ranks one contiguous tensor.
// - `WaitSignalOptions`: the timeout of a wait for a signal.
//
// Guide: docs/guide/reference/groups-and-messages.md. PyTorch: torch.distributed._symmetric_memory.
#pragma once

#include "cadre/tensor/group/symmetric_tensor.h"
