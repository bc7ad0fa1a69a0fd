// The mean loss over the tokens of all ranks, and its gradients, for ranks that have different
// tokens. A rank's backward computes the terms of its own tokens; sum_gradients() then sums them
// over the ranks.
//
// Threads: as ProcessGroup. Blocking: collective, until the group's deadline. Lifetime: the graph
// keeps the group. Errors: cadre::Error; kInvalidArgument, on all ranks, for a gradient that is not
// dense, for parameters that differ between ranks, for a sum that is not a floating-point number,
// and for a negative count. Errors begin with `caller`, which must be static text.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

// `sum`, of shape (), is the sum of the losses of this rank's tokens, and `count` the number of
// these tokens. Returns the mean over the tokens of all ranks: shape (), the same on every rank,
// NaN if there are no tokens. Its backward reaches this rank's tokens only. If this rank could not
// compute its sum, pass the error as `refusal`; then all ranks throw it. `device_count`, (), int64:
// further tokens of this rank, whose number only the device knows; the host does not wait for it.
at::Tensor mean_over_tokens(const at::Tensor& sum, int64_t count, const ProcessGroup& group,
                            const char* caller, const std::optional<Error>& refusal = {},
                            const at::Tensor& device_count = {});

// Replaces the gradients of parameters that have the same values on every rank by their sums over
// the group. All ranks pass the same parameters in the same order; a parameter that is listed twice
// (a tied weight) counts once. If this rank has no gradient of a parameter but another rank has
// one, this rank counts as zeros; if no rank has one, none is created, as in one process. A second
// call adds the sums again.
void sum_gradients(const std::vector<at::Tensor>& parameters, const ProcessGroup& group,
                   const char* caller);

}  // namespace cadre
