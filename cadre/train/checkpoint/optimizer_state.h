// The state of a torch::optim optimizer by parameter name, and back: of a plain optimizer, a
// ShardedOptimizer, an OffloadedOptimizer, or the local one of a ZeroRedundancyOptimizer, whose own
// state_dict() and load_state_dict() have whole tensors.
//
// Threads: one. Blocking: never. Lifetime: both calls copy tensors, unless asked to share them.
// Errors: kInvalidArgument that names the parameter and the state: for a parameter of the optimizer
// that is not among those given (the optimizer was constructed before the model was wrapped), a
// state that is unknown to the optimizer with its options, missing, or of another size, and an
// optimizer other than Adam, AdamW, SGD, RMSprop, Adagrad and cadre::Adadelta, or classes derived
// from them, such as cadre::AdamW. Names are those of torch.optim: step, exp_avg, exp_avg_sq,
// max_exp_avg_sq, momentum_buffer, square_avg, grad_avg, sum, acc_delta. Learning rates and other
// options are not part of it.
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
  // The optimizer's own tensors, which each step changes in place: for a save before the next step.
  bool is_shared = false;
};

// The states of the parameters that had a gradient in a step; a copy, which later steps do not
// change. A parameter is identified by its `values`, the leaf from which the optimizer was
// constructed. Copies lie in memory, also those of states in a file (FileOffload).
CADRE_EXPORT std::vector<ParameterState> state_dict(const torch::optim::Optimizer& optimizer,
                                                    std::span<const SnapshotTensor> parameters,
                                                    const StateDictOptions& options = {});

// Replaces the whole state by copies, so that `states` can be loaded again, also into other
// optimizers; parameters that are not in `states` have none afterwards, as in a new optimizer.
// States of parameters of which this rank holds nothing, and which are not the optimizer's, are
// left out. Checks everything first.
CADRE_EXPORT void load_state_dict(torch::optim::Optimizer& optimizer,
                                  std::span<const SnapshotTensor> parameters,
                                  std::span<const ParameterState> states);

}  // namespace cadre
