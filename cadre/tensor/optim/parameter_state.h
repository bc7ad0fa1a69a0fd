// The state of an optimizer for one parameter: what state_dict() returns and load_state_dict()
// takes, of any optimizer, and what a snapshot has of it.
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
  std::string parameter;  // its name in the plain module
  // With the sizes of the parameter, in the state of a ZeroRedundancyOptimizer; with those of the
  // `values` of this rank's record, in the state for a snapshot.
  std::vector<NamedTensor> tensors = {};
  std::vector<NamedTensor> scalars = {};  // 0-dim, equal on all ranks: "step", int64
  // Which of the records with this name, in their order: not 0 where a rank has several tensors of
  // a tied weight.
  size_t entry = 0;
};

}  // namespace cadre
