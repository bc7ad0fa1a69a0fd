#include "cadre/parallel/zero/gradient_comparison.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <string_view>

namespace cadre::parallel {

void add_gradient_sample(Fnv1a& digest, const at::Tensor& parameter) {
  constexpr int64_t kNumSamples = 16;
  at::Tensor gradient = parameter.grad();
  digest.add(gradient.defined() ? 1 : 0);
  if (!gradient.defined() || gradient.layout() != at::kStrided || gradient.numel() == 0) return;
  if (!gradient.is_non_overlapping_and_dense()) gradient = gradient.contiguous();
  const auto element = static_cast<int64_t>(gradient.element_size());
  const auto* const bytes = static_cast<const char*>(gradient.const_data_ptr());
  const int64_t last = gradient.numel() - 1;
  const int64_t count = std::min(kNumSamples, gradient.numel());
  for (int64_t k = 0; k < count; ++k) {
    const int64_t index = count == 1 ? 0 : last * k / (count - 1);
    digest.add(std::string_view(bytes + index * element, static_cast<size_t>(element)));
  }
}

std::optional<UnlikeGradient> first_unlike_sum(std::span<const NamedTensor> parameters,
                                               const wrap::LocatedGroup& group) {
  const auto count = static_cast<int64_t>(parameters.size());
  const int world_size = group.world_size();
  constexpr double kUndefined = -1.2345e300;  // which is not zero
  const at::Tensor sums = at::zeros({count}, at::kDouble);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = parameters[i].tensor.grad();
    sums.mutable_data_ptr<double>()[i] =
        gradient.defined() ? at::sum(gradient.detach().to_dense(), at::kDouble).item<double>()
                           : kUndefined;
  }
  const at::Tensor all = at::empty({world_size * count}, at::kDouble);
  group.all_gather(all, sums);
  const double* const values = all.const_data_ptr<double>();
  for (int64_t i = 0; i < count; ++i) {
    for (int rank = 1; rank < world_size; ++rank) {
      if (std::memcmp(&values[i], &values[rank * count + i], sizeof(double)) == 0) continue;
      return UnlikeGradient{.rank = rank, .parameter = static_cast<size_t>(i)};
    }
  }
  return std::nullopt;
}

}  // namespace cadre::parallel
