// Whether the ranks have the same whole gradients, as after a reduction.
//
// Threads: one. Blocking: first_unlike_sum() is collective, until the group's deadline. Lifetime:
// keeps nothing. Errors: those of the group.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <span>

#include "cadre/core/base/fnv1a.h"
#include "cadre/tensor/hooks/located_group.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::parallel {

// Adds up to 16 elements of the parameter's gradient, from its first to its last, or that there is
// none.
void add_gradient_sample(Fnv1a& digest, const at::Tensor& parameter);

struct UnlikeGradient {
  int rank;          // that differs from rank 0
  size_t parameter;  // the first one
};
// Compares the sum of each gradient.
std::optional<UnlikeGradient> first_unlike_sum(std::span<const NamedTensor> parameters,
                                               const wrap::LocatedGroup& group);

}  // namespace cadre::parallel
