// A tensor that is divided among the ranks of a mesh: this rank's part, and where the others are.
//
//   const cadre::DeviceMesh mesh(world, {{"dp", 2}, {"tp", 2}});
//   const auto whole = torch::arange(12.0).view({6, 2});
//   const auto divided =
//       cadre::DTensor::distribute(whole, mesh, {cadre::Shard(0), cadre::Replicate()});
//   const auto product = divided.local() * 2;  // this rank's rows
//   const auto again =
//       cadre::DTensor::from_local(product, mesh, {cadre::Shard(0), cadre::Replicate()}, {6, 2});
//   const auto all_rows = again.full_tensor();
//
// Declares:
// - `DTensor`, `RedistributeOptions`: the tensor, with redistribution that autograd records.
// - `Placement`, `Shard`, `Replicate`, `Partial`: what the ranks of one axis hold.
// - `to_string()`, `normalized()`: converts placements to text, and checks them.
// - `Box`, `local_box()`: the part of a tensor that a rank holds.
//
// Guide: docs/guide/parallel/mesh.md. PyTorch: torch.distributed.tensor.DTensor.
#pragma once

#include "cadre/tensor/mesh/dtensor.h"
#include "cadre/tensor/mesh/placement.h"
