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
  std::string parameter;  // the name of the parameter in the plain module
  // In the state of a ZeroRedundancyOptimizer the tensors have the sizes of the parameter. In the
  // state for a snapshot they have those of the `values` of this rank's ParameterShard.
  std::vector<NamedTensor> tensors = {};
  // 0-dim tensors that are equal on all ranks, such as "step" of int64.
  std::vector<NamedTensor> scalars = {};
  // The index among the ParameterShards with this name, in their order. It is not 0 only if a rank
  // has several tensors of a tied weight.
  size_t entry = 0;
};

}  // namespace cadre
