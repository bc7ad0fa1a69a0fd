// The state of a torch::optim optimizer by parameter name, and back.
//
// Threads: one. Blocking: never. Lifetime: what optimizer_state() returns shares the optimizer's
// tensors; set_optimizer_state() keeps those that it is given.
// Errors: kInvalidArgument that names the parameter and the state: for a parameter of the optimizer
// that is none of those given (the optimizer was built before the model was wrapped), a state that
// the optimizer with its options does not have, lacks, or has of another size, and an optimizer
// that is none of Adam, AdamW, SGD, RMSprop and Adagrad, or derived from one of them, as
// cadre::AdamW. Names are those of torch.optim: step, exp_avg, exp_avg_sq, max_exp_avg_sq,
// momentum_buffer, square_avg, grad_avg, sum. Learning rates and other options are not part of it.
#pragma once

#include <span>
#include <vector>

#include "cadre/base/export.h"
#include "cadre/checkpoint/snapshot_parts.h"

namespace torch::optim {
class Optimizer;
}

namespace cadre {

// Of the parameters that have a state: those that had a gradient in a step. A parameter is known by
// its `values`, the leaf that the optimizer was built with.
CADRE_EXPORT std::vector<ParameterState> optimizer_state(
    const torch::optim::Optimizer& optimizer, std::span<const SnapshotTensor> parameters);

// Replaces the whole state; what is not among `states` has none, as in a new optimizer. Checks
// everything first.
CADRE_EXPORT void set_optimizer_state(torch::optim::Optimizer& optimizer,
                                      std::span<const SnapshotTensor> parameters,
                                      std::span<const ParameterState> states);

}  // namespace cadre
