// Splits the layers of a model into the stages of a pipeline.
//
// Threads: pure functions. Blocking: never. Lifetime: values.
// Errors: kInvalidArgument, with the numbers, for fewer layers than stages and invalid costs.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre {

// Returns the index of the first layer of each stage, followed by the number of layers: stage s has
// the layers begin[s] to begin[s + 1] - 1, at least one. Of all splits into consecutive layers the
// result has the smallest maximum of the stage costs. Costs may have any unit: measured times,
// parameters.
CADRE_EXPORT Result<std::vector<size_t>> split_layers(std::span<const double> layer_costs,
                                                      int num_stages);

}  // namespace cadre
