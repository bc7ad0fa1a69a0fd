// The option of the wrappers that says how the gradients of the ranks are combined: as a mean of
// the ranks, as a mean weighted by each rank's number of samples, or as a sum.
#pragma once

#include <string_view>

#include "cadre/core/base/export.h"

namespace cadre {

enum class GradientWeighting {
  // The mean over the ranks: each rank has the same weight, whatever the size of its batch.
  kEqual,
  // The mean over all samples: each rank's gradient is a mean over its samples and is weighted by
  // their number. A rank without samples contributes zeros, and still runs its backward. A forward
  // has as many samples as its first tensor has rows (size(0)), unless set_num_samples() says how
  // many. Costs one message of 128 bytes before each synchronized backward.
  kSamples,
  // Gradients are summed. This fits a loss that is divided by the samples or tokens of all ranks,
  // such as that of mean_over_tokens().
  kSum,
};
// Returns the enumerator's name, such as "GradientWeighting::kEqual".
CADRE_EXPORT std::string_view to_string(GradientWeighting weighting);

}  // namespace cadre
