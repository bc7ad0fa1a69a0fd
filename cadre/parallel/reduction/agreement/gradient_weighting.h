// The option of the wrappers that says how the gradients of the ranks become one: each counts the
// same, or by its samples, or they are added up.
#pragma once

#include <string_view>

#include "cadre/core/base/export.h"

namespace cadre {

enum class GradientWeighting {
  // Every rank's gradient counts the same, whatever the sizes of the batches.
  kEqual,
  // Every rank's gradient, a mean over samples, counts by the number of these samples, so that the
  // result is the mean over all samples. A rank without samples contributes zeros, and still runs
  // its backward. A forward has as many samples as its first tensor has rows (size(0)), unless
  // set_num_samples() says how many. Costs one message of 128 bytes before each synchronized
  // backward.
  kSamples,
  // Gradients are summed. This fits a loss that is divided by the samples or tokens of all ranks,
  // such as that of mean_over_tokens().
  kSum,
};
// Returns "GradientWeighting::kEqual" and the like.
CADRE_EXPORT std::string_view to_string(GradientWeighting weighting);

}  // namespace cadre
