// Determines, for a data loader, which ranks of a mesh get different rows of a batch and which get
// the same.
//
//   const cadre::DataRanks data = cadre::data_ranks(mesh);       // {pp: 2, dp: 2, tp: 2}
//   cadre::DataLoader loader(dataset, {.batch_size = 64, .ranks = data.group});
//
// Along pp, cp and tp ranks work on the same rows; along dp, dp_replicate, dp_shard and ep each has
// rows of its own.
//
// Threads: as DeviceMesh::joint_group. Blocking: the first call of a mesh, until all ranks of the
// group have called it. Lifetime: a value; keeps the group. Errors: kInvalidArgument for an axis of
// another name that is in neither list of the options, one that is in both, one that the mesh does
// not have, and a slice of a mesh, which does not show all axes.
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
  // Axes with other names than those above. Ranks along split_axes have different rows, ranks along
  // shared_axes the same rows.
  std::vector<std::string> split_axes = {};
  std::vector<std::string> shared_axes = {};
};

struct CADRE_EXPORT DataRanks {
  int rank = 0;  // the part of a batch that this rank has
  int size = 1;  // the number of parts
  // The ranks with different parts, in the order of the parts. If nullopt, all ranks have the same
  // rows.
  std::optional<ProcessGroup> group = {};

  // Returns the mean over the parts of a value of this rank's part, such as its mean loss; parts of
  // equal size are assumed. The result is a new tensor without history, the same on all ranks.
  // Collective along `group`.
  at::Tensor mean(const at::Tensor& value) const;
};

// mesh: the mesh of all ranks.
CADRE_EXPORT DataRanks data_ranks(const DeviceMesh& mesh, const DataRanksOptions& options = {});

}  // namespace cadre
