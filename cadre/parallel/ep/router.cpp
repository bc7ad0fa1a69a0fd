#include "cadre/parallel/ep/router.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>

#include <tuple>

namespace cadre::parallel {

RouterChoices choose_experts(const at::Tensor& logits, const RouterOptions& options) {
  RouterChoices choices{.probabilities = at::softmax(logits, 1),
                        .log_sums = at::logsumexp(logits, 1),
                        .experts = {},
                        .weights = {}};
  // topk() may return any of several equal logits, so a stable sort is used. A token has few
  // experts to sort.
  const at::Tensor order =
      std::get<1>(at::sort(logits.detach(), /*stable=*/true, /*dim=*/1, /*descending=*/true));
  choices.experts = order.narrow(1, 0, options.num_selected).contiguous();
  choices.weights = choices.probabilities.gather(1, choices.experts);
  if (options.normalize_weights) {
    choices.weights = choices.weights / choices.weights.sum(1, /*keepdim=*/true);
  }
  return choices;
}

}  // namespace cadre::parallel
