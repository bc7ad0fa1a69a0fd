// Parameter shards with known gradients, for tests of functions that read or change gradients.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::testing {

// Returns this rank's shards of parameters "p0", "p1", ... with these numbers of elements. Each
// parameter is divided flat over the ranks of the mesh, so the last ranks may hold no element. All
// gradients are ones.
inline std::vector<ParameterShard> shards_of_ones(const DeviceMesh& mesh,
                                                  const std::vector<int64_t>& numels,
                                                  torch::ScalarType dtype = torch::kFloat) {
  std::vector<ParameterShard> shards;
  const int64_t num_ranks = mesh.size("shard");
  const int64_t rank = mesh.coordinate("shard");
  for (const int64_t numel : numels) {
    const int64_t part = (numel + num_ranks - 1) / num_ranks;
    const FlatRange range = {std::min(numel, rank * part), std::min(numel, (rank + 1) * part)};
    const torch::Tensor values = torch::zeros({range.size()}, dtype).requires_grad_();
    values.mutable_grad() = torch::ones({range.size()}, dtype);
    shards.push_back({.name = "p" + std::to_string(shards.size()),
                      .sizes = {numel},
                      .mesh = mesh,
                      .placements = std::vector<Placement>(mesh.axes().size(), Replicate()),
                      .flat_axis = "shard",
                      .range = range,
                      .values = values,
                      .parameter = {}});
  }
  return shards;
}

// Sets element `index` of the whole gradient if this rank holds it; does nothing on other ranks.
inline void set_gradient(const ParameterShard& shard, int64_t index, double value) {
  if (index < shard.range.begin || index >= shard.range.end) return;
  shard.values.mutable_grad()[index - shard.range.begin] = value;
}

class GradientToolsOnRanks : public ::testing::TestWithParam<int> {
 protected:
  void run(const std::function<void(const ProcessGroup&)>& rank) const {
    const auto result =
        run_groups(GetParam(), [&](const ProcessGroup& group, std::string&) { rank(group); });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
};

}  // namespace cadre::testing
