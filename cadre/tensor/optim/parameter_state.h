// The state of an optimizer for one parameter: what state_dict() of any optimizer returns,
// load_state_dict() takes, and a snapshot contains.
//
// Threads: plain values. Lifetime: shares the tensors.
// Names are those of torch.optim: step, exp_avg, exp_avg_sq, max_exp_avg_sq, momentum_buffer,
// square_avg, grad_avg, sum, acc_delta.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

struct ParameterState {
  std::string parameter;  // name of the parameter in the plain module
  // In the state of a ZeroRedundancyOptimizer the tensors have the sizes of the parameter; in the
  // state for a snapshot, those of the `values` of this rank's record.
  std::vector<NamedTensor> tensors = {};
  std::vector<NamedTensor> scalars = {};  // 0-dim, equal on all ranks: "step", int64
  // Index among the records with this name, in their order; not 0 only if a rank has several
  // tensors of a tied weight.
  size_t entry = 0;
};

}  // namespace cadre
