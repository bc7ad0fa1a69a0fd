// Determines, for a data loader, which ranks of a mesh get different rows of a batch and which get
// the same.
//
//   const cadre::DataRanks data = cadre::data_ranks(mesh);       // {pp: 2, dp: 2, tp: 2}
//   cadre::DataLoader loader(dataset, {.batch_size = 64, .ranks = data.group});
//
// Ranks along the axes pp, cp and tp work on the same rows; ranks along dp, dp_replicate, dp_shard
// and ep each have different rows.
//
// Threads: as DeviceMesh::joint_group. Blocking: the first call of a mesh, until all ranks of the
// group have called it. Lifetime: a value; keeps the group. Errors: kInvalidArgument for an axis
// with another name that is in neither or in both lists of the options, for an unknown axis in the
// options, and for a slice of a mesh, because data_ranks() must see all axes.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/mesh/device_mesh.h"

namespace cadre {

struct DataRanksOptions {
  // The axes whose names are not in the list above: ranks along split_axes have different rows, and
  // ranks along shared_axes have the same rows.
  std::vector<std::string> split_axes = {};
  std::vector<std::string> shared_axes = {};
};

struct CADRE_EXPORT DataRanks {
  // The index of this rank's part of a batch.
  int rank = 0;
  // The number of parts into which a batch is divided.
  int size = 1;
  // The ranks with different parts, in the order of the parts. If nullopt, all ranks have the same
  // rows.
  std::optional<ProcessGroup> group = {};

  // Averages a value of this rank's part of the batch, such as its mean loss, over all parts, which
  // are assumed to have equal sizes. The result is a new tensor without autograd history, the same
  // on all ranks. Collective along `group`.
  at::Tensor mean(const at::Tensor& value) const;
};

// mesh: the mesh of all ranks.
CADRE_EXPORT DataRanks data_ranks(const DeviceMesh& mesh, const DataRanksOptions& options = {});

}  // namespace cadre
