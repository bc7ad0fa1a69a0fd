// Checks the ParameterShards (descriptions of this rank's parts of the parameters) of layers that
// are divided among ranks.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <vector>

#include "cadre/parallel/shard/division/boxes.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/mesh/layout.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {

// Requires that `records` has one entry for each parameter of `whole`, in any order, and that the
// entry's values are the tensor of `divided` and equal this rank's part of the parameter in
// `whole`. Returns how many parameters are divided along the axis with this index.
inline int num_divided(const std::vector<ParameterShard>& records, const torch::nn::Module& divided,
                       const torch::nn::Module& whole, size_t axis) {
  const auto expected = whole.named_parameters();
  require(records.size() == expected.size(), "expected one record for each parameter");
  int count = 0;
  for (const ParameterShard& record : records) {
    const torch::Tensor& tensor = expected[record.name];
    require(record.sizes == tensor.sizes().vec(), "the record has other sizes: " + record.name);
    require(record.values.is_same(divided.named_parameters()[record.name]), record.name);
    const Box box = shard::local_box_of(record);
    torch::Tensor part = tensor;
    for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
      part = part.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
    }
    require(torch::equal(record.values, part), "values of " + record.name);
    count += record.placements[axis].shard() != nullptr ? 1 : 0;
  }
  return count;
}

}  // namespace cadre::testing
