#include "cadre/core/schedule/partition.h"

#include <algorithm>
#include <cmath>

#include "cadre/core/base/format.h"

namespace cadre {

// Dynamic programming over stages: best[i] is the smallest possible maximum of the stage costs if
// the stages up to the present one have the first i layers. best[i] never decreases with i, and the
// cost of the last stage decreases if it begins later, so a binary search finds the best begin next
// to the point where the two are equal: O(stages * layers * log(layers)).
Result<std::vector<size_t>> split_layers(std::span<const double> layer_costs, int num_stages) {
  const size_t num_layers = layer_costs.size();
  if (num_stages < 1 || num_layers < static_cast<size_t>(num_stages)) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("{} layers for {} stages; each stage needs at least one layer",
                               num_layers, num_stages));
  }
  std::vector<double> sums{0};  // sums[i] is the cost of the first i layers
  for (const double cost : layer_costs) {
    if (!std::isfinite(cost) || cost < 0) {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("layer {} has the cost {}; costs must be finite and at least 0",
                                 sums.size() - 1, cost));
    }
    sums.push_back(sums.back() + cost);
  }
  const auto stages = static_cast<size_t>(num_stages);
  std::vector<double> best(sums);  // the costs if there is one stage
  // begin_of[s][i] is the begin of stage s if stages 0 to s have the first i layers.
  std::vector<std::vector<size_t>> begin_of(stages, std::vector<size_t>(num_layers + 1, 0));
  for (size_t stage = 1; stage < stages; ++stage) {
    std::vector<double> next(num_layers + 1, 0);
    for (size_t end = stage + 1; end <= num_layers; ++end) {
      // Searches for the first begin of the last stage at which the stages before it cost at least
      // as much as the last stage.
      size_t low = stage;
      size_t high = end - 1;
      while (low < high) {
        const size_t middle = (low + high) / 2;
        if (best[middle] < sums[end] - sums[middle]) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      const auto cost_at = [&](size_t begin) {
        return std::max(best[begin], sums[end] - sums[begin]);
      };
      const bool earlier_is_better = low > stage && cost_at(low - 1) < cost_at(low);
      begin_of[stage][end] = earlier_is_better ? low - 1 : low;
      next[end] = cost_at(begin_of[stage][end]);
    }
    best = std::move(next);
  }
  std::vector<size_t> begins(stages + 1, num_layers);
  for (size_t stage = stages; stage-- > 0;) begins[stage] = begin_of[stage][begins[stage + 1]];
  return begins;
}

}  // namespace cadre
