#include "cadre/parallel/reduction/agreement/gradient_weighting.h"

namespace cadre {

std::string_view to_string(GradientWeighting weighting) {
  switch (weighting) {
    case GradientWeighting::kEqual:
      return "GradientWeighting::kEqual";
    case GradientWeighting::kSamples:
      return "GradientWeighting::kSamples";
    case GradientWeighting::kSum:
      break;
  }
  return "GradientWeighting::kSum";
}

}  // namespace cadre
