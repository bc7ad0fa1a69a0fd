// The ranks of a group as a grid with named axes, and the groups along its axes.
//
//   const cadre::DeviceMesh mesh(world, {{"dp", 2}, {"tp", 4}});
//   mesh.group("tp").all_reduce(x);  // the ranks that differ from this one in "tp" only
//   const auto tp = mesh["tp"];      // a mesh of one axis
//   const auto flat = mesh.flatten({"dp", "tp"}, "all");
//   const cadre::DataRanks data =
//       cadre::data_ranks(mesh);  // whose rows of a batch this rank has
//   std::printf("rows %d, coordinate %d\n", data.rank, mesh.coordinate("tp"));
//
// Declares:
// - `DeviceMesh`, `MeshAxis`: the grid, and an axis with its name and size.
// - `Ranks`: the ranks of a group, or along some axes of a mesh: the argument of wrappers, layers
//   and loaders.
// - `data_ranks()`, `DataRanks`, `DataRanksOptions`: which ranks have different rows of a batch,
//   and which the same.
//
// Guide: docs/guide/parallel/mesh.md. PyTorch: torch.distributed.device_mesh.DeviceMesh.
#pragma once

#include "cadre/tensor/mesh/data_ranks.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/ranks.h"
