// Gets and sets the state of a torch::optim optimizer by parameter name. The optimizer is a plain
// one, a ShardedOptimizer, an OffloadedOptimizer, or the local optimizer of a
// ZeroRedundancyOptimizer, whose own state_dict() and load_state_dict() use whole tensors.
//
// Threads: one. Lifetime: both calls copy tensors, unless asked to share them. Errors:
// kInvalidArgument that names the parameter and the state. It is thrown for a parameter of the
// optimizer that is not among those given (the optimizer was constructed before the model was
// wrapped); for a state that is missing, has another size, or is unknown to the optimizer with its
// options; for an empty list of states (LoadStateDictOptions); and for an optimizer other than
// Adam, AdamW, SGD, RMSprop, Adagrad and cadre::Adadelta, or classes derived from them, such as
// cadre::AdamW. States have the names of torch.optim: step, exp_avg, exp_avg_sq, max_exp_avg_sq,
// momentum_buffer, square_avg, grad_avg, sum, acc_delta. Learning rates and other options are not
// part of the state.
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
  // Set it only if the save ends before the next step.
  bool is_shared = false;
};

struct LoadStateDictOptions {
  // If true, an empty list of states resets the optimizer, also one whose steps need a state. If
  // false, this is an error, because a snapshot that was saved without `SnapshotParts::optimizer`,
  // or loaded without `LoadOptions::with_optimizer`, would silently restart all moments at zero.
  bool allow_none = false;
};

// Returns a copy of the states of all parameters that have had a gradient in some step; later steps
// do not change the copy. A parameter is identified by its `values`, the leaf from which the
// optimizer was constructed. The copies are in memory, even if FileOffload keeps the states in a
// file.
CADRE_EXPORT std::vector<ParameterState> state_dict(const torch::optim::Optimizer& optimizer,
                                                    std::span<const SnapshotTensor> parameters,
                                                    const StateDictOptions& options = {});

// Checks `states`, then replaces the whole state of the optimizer by copies of them, so that
// `states` can also be loaded into other optimizers. Parameters without an entry in `states` have
// no state afterwards, as in a new optimizer. An entry is ignored if this rank holds no elements of
// its parameter and the optimizer does not have the parameter.
CADRE_EXPORT void load_state_dict(torch::optim::Optimizer& optimizer,
                                  std::span<const SnapshotTensor> parameters,
                                  std::span<const ParameterState> states,
                                  const LoadStateDictOptions& options = {});

}  // namespace cadre
