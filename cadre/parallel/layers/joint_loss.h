// The loss of ranks that have different tokens, which is the mean over the tokens of all ranks, and
// its gradients: a rank's backward computes the terms of its own tokens, which are then summed.
//
// Threads: as ProcessGroup. Blocking: collective, until the group's deadline. Lifetime: the graph
// keeps the group. Errors: cadre::Error; kInvalidArgument, on all ranks, for a gradient that is not
// dense, for parameters that differ between ranks, for a sum that is no number, and for a negative
// count. `caller` is static text, with which an error begins.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

// sum: (), the sum of the losses of this rank's tokens; count: the number of these tokens. Result:
// (), the same on every rank: the mean over the tokens of all ranks, NaN if there are none. Its
// backward goes to this rank's tokens only. refusal: an error of this rank in place of the sum,
// which all ranks throw.
at::Tensor mean_over_tokens(const at::Tensor& sum, int64_t count, const ProcessGroup& group,
                            const char* caller, const std::optional<Error>& refusal = {});

// Replaces the gradients of parameters that have the same values on every rank by their sums over
// the group. All ranks pass the same parameters in the same order; one that is in the list twice (a
// tied weight) counts once. A parameter without a gradient on this rank counts as zeros, and stays
// without one if no rank has one, as in one process. A second call adds the sums again.
void sum_gradients(const std::vector<at::Tensor>& parameters, const ProcessGroup& group,
                   const char* caller);

}  // namespace cadre
