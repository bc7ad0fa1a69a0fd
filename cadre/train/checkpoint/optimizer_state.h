// Gets and sets the state of a torch::optim optimizer by parameter name: of a plain optimizer, a
// ShardedOptimizer, an OffloadedOptimizer, or the local optimizer of a ZeroRedundancyOptimizer,
// whose own state_dict() and load_state_dict() have whole tensors.
//
// Threads: one. Blocking: never. Lifetime: both calls copy tensors, unless asked to share them.
// Errors: kInvalidArgument that names the parameter and the state: for a parameter of the optimizer
// that is not among those given (the optimizer was constructed before the model was wrapped); for a
// state that is unknown to the optimizer with its options, missing, or of another size; and for an
// optimizer other than Adam, AdamW, SGD, RMSprop, Adagrad and cadre::Adadelta, or classes derived
// from them, such as cadre::AdamW. Names are those of torch.optim: step, exp_avg, exp_avg_sq,
// max_exp_avg_sq, momentum_buffer, square_avg, grad_avg, sum, acc_delta. Learning rates and other
// options are not part of the state.
#pragma once

#include <span>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/train/checkpoint/snapshot_parts.h"

namespace torch::optim {
class Optimizer;
}

namespace cadre {

struct StateDictOptions {
  // If true, state_dict() returns the optimizer's own tensors, which each step changes in place.
  // Use it for a save that ends before the next step.
  bool is_shared = false;
};

// Returns a copy of the states of the parameters that have had a gradient in a step; later steps do
// not change it. A parameter is identified by its `values`, the leaf from which the optimizer was
// constructed. Copies lie in memory, also those of states in a file (FileOffload).
CADRE_EXPORT std::vector<ParameterState> state_dict(const torch::optim::Optimizer& optimizer,
                                                    std::span<const SnapshotTensor> parameters,
                                                    const StateDictOptions& options = {});

// Replaces the whole state by copies, so that `states` can be loaded again, also into other
// optimizers. Parameters that are not in `states` have no state afterwards, as in a new optimizer.
// A state is ignored if this rank holds no part of its parameter and the optimizer does not have
// the parameter. Checks everything first.
CADRE_EXPORT void load_state_dict(torch::optim::Optimizer& optimizer,
                                  std::span<const SnapshotTensor> parameters,
                                  std::span<const ParameterState> states);

}  // namespace cadre
